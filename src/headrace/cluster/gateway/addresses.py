"""Which engines the configuration names: what each is called, where it is, and its key.

Addresses come from here alone; nothing that a client sends becomes part of one.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from headrace.core.base.errors import ConfigError
from headrace.core.config.cluster import ClusterConfig
from headrace.models.files import read_text

MAX_KEYS_BYTES = 1 << 20
OTHERS = "*"

_EVENTS, _REPLAY = "kv-events", "kv-replay"

# Of a ZeroMQ publisher: a host or an address, and a port.
_ZMQ = re.compile(r"tcp://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})")
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,64})=(?P<url>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Address:
    name: str
    url: str  # of the root under which /v1 and /health lie, without a slash at its end
    # Sent as a bearer token in place of what the client sent; "" = that is passed on.
    key: str = field(default="", repr=False)
    kv_events: str = ""  # ZeroMQ address that it publishes its KV events at; empty = it does not
    kv_replay: str = ""  # where those that were missed can be had again


def engine_addresses(config: ClusterConfig) -> list[Address]:
    """Engines without a name are `e0`, `e1`, … by their place. ConfigError tells all faults."""
    faults: list[str] = []
    urls: dict[str, str] = {}
    feeds: dict[str, dict[str, str]] = {}
    for place, text in enumerate(config.engines):
        named = _NAMED.fullmatch(text)
        name, url = (named["name"], named["url"]) if named else (f"e{place}", text)
        url, *options = url.split(",")
        feeds[name] = _read_options(name, options, faults)
        url = url.rstrip("/").removesuffix("/v1")  # what clients of OpenAI call the base
        if fault := _find_fault(url):
            faults.append(f"engine {name}: {fault}")
        if name in urls:
            faults.append(f"two engines are called {name}")
        urls[name] = url
    keys = _read_keys(config.engine_keys, set(urls), faults)
    if faults:
        raise ConfigError(
            "\n".join(faults),
            hint="an engine is URL or NAME=URL, http or https,"
            f" and may go on with `,{_EVENTS}=tcp://HOST:PORT,{_REPLAY}=tcp://HOST:PORT`",
        )
    return [
        Address(
            name,
            url,
            keys.get(name, keys.get(OTHERS, "")),
            feeds[name].get(_EVENTS, ""),
            feeds[name].get(_REPLAY, ""),
        )
        for name, url in urls.items()
    ]


def _read_options(name: str, options: list[str], faults: list[str]) -> dict[str, str]:
    """What follows the URL."""
    read: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in (_EVENTS, _REPLAY):
            faults.append(f"engine {name}: unknown option {key[:32]!r} after its address")
        elif not (match := _ZMQ.fullmatch(value)) or not 0 < int(match["port"]) < 1 << 16:
            faults.append(f"engine {name}: {key} is not tcp://HOST:PORT")
        elif key in read:
            faults.append(f"engine {name}: {key} is named twice")
        else:
            read[key] = value
    if _REPLAY in read and _EVENTS not in read:
        faults.append(f"engine {name}: {_REPLAY} without {_EVENTS}")
    return read


def _find_fault(url: str) -> str:
    try:
        parts = urlsplit(url)
        # As it is looked up; a label may be too long, or empty.
        has_host = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        return "its address is no URL"
    if parts.scheme not in ("http", "https") or not has_host:
        return "its address is no http or https URL"
    if parts.username is not None or parts.password is not None:
        return "its address has credentials, which belong into `cluster.engine_keys`"
    if parts.query or parts.fragment or not url.isprintable() or " " in url:
        return "its address has more than scheme, host, port and path"
    return ""


def _read_keys(file: str, names: set[str], faults: list[str]) -> dict[str, str]:
    if not file:
        return {}
    keys: dict[str, str] = {}
    text = read_text(Path(file).expanduser(), MAX_KEYS_BYTES)
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # A fault must not show what may be a key.
        if len(words) != 2 or not words[1].isascii():
            faults.append(f"line {number} of {file} is not `NAME KEY`")
        elif words[0] not in names | {OTHERS}:
            faults.append(f"line {number} of {file} has a name that no engine has")
        else:
            keys[words[0]] = words[1]
    return keys
