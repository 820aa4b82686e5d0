"""`headrace role`: lets a worker of a running server be for something else."""

import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Final
from urllib.parse import quote

import msgspec
from rich.text import Text

from headrace.cli.output import console, print_json
from headrace.cli.top_reading import is_http
from headrace.core.base.errors import ConfigError
from headrace.core.base.names import one_line

TIMEOUT_S: Final = 20.0  # longer than the server waits for the worker
MAX_ANSWER_BYTES: Final = 1 << 20


class _State(msgspec.Struct):
    """Of a worker, as far as it is told in words."""

    name: str
    role: str


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


def role(worker: str, kind: str, url: str, *, as_json: bool) -> int:
    """ConfigError where the server does not do it, with what it says."""
    if not is_http(url):
        raise ConfigError(f"{url!r} is no http address", hint="for instance http://127.0.0.1:8000")
    base = url.rstrip("/").removesuffix("/v1")
    asked = urllib.request.Request(
        f"{base}/admin/workers/{quote(worker, safe='', errors='surrogateescape')}/role",
        msgspec.json.encode({"role": kind}),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            body = answer.read(MAX_ANSWER_BYTES)
        state = msgspec.json.decode(body, type=_State)
    except urllib.error.HTTPError as error:
        raise ConfigError(_refusal(error.read(MAX_ANSWER_BYTES), error.code)) from None
    except msgspec.DecodeError:
        raise ConfigError(f"what {base} answers is no worker's state") from None
    except (OSError, UnicodeError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(f"{base} does not answer: {reason}") from None
    if as_json:
        print_json(msgspec.json.decode(body))
    else:
        console().print(Text(one_line(f"worker {state.name} is for {state.role} now")))
    return 0


def _refusal(body: bytes, status: int) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        return f"the server answers with status {status}"
