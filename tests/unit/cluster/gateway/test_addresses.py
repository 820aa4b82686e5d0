"""Names, addresses and keys of engines, as an operator writes them."""

from pathlib import Path

import pytest

from headrace.cluster.gateway.addresses import Address, engine_addresses
from headrace.core.base.errors import ConfigError
from headrace.core.config.cluster import ClusterConfig


def addresses(*engines: str, keys: Path | str = "") -> list[Address]:
    return engine_addresses(ClusterConfig(engines=engines, engine_keys=str(keys)))


def fault(*engines: str, keys: Path | str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        addresses(*engines, keys=keys)
    return caught.value.message


def test_names_by_place_or_as_given() -> None:
    found = addresses(
        "http://127.0.0.1:1", "b.2=https://host/base/", "http://[::1]:3/v1/", "http://é.net."
    )
    assert [(one.name, one.url) for one in found] == [
        ("e0", "http://127.0.0.1:1"),
        ("b.2", "https://host/base"),
        ("e2", "http://[::1]:3"),
        ("e3", "http://é.net."),
    ]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:1",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host:0",
        "http://user:secret@host",
        "http://host?x=1",
        "http://host#x",
        "http://ho st",
        "http://host/\r\nx",
        "http://a..b",
        f"http://{'a' * 64}.net:1",
    ],
)
def test_what_is_no_address(url: str) -> None:
    message = fault(url)
    assert message.startswith("engine e0: its address")
    assert "secret" not in message


def test_all_faults_at_once() -> None:
    lines = fault("a=http://x", "a=http://y", "b=gopher://z").splitlines()
    assert lines == [
        "two engines are called a",
        "engine b: its address is no http or https URL",
    ]


def test_keys_by_name_and_for_all_others(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# keys\n\nb  key-of-b\n* key-of-others\n")
    found = addresses("a=http://x", "b=http://y", keys=file)
    assert [one.key for one in found] == ["key-of-others", "key-of-b"]
    assert "key-of" not in repr(found)


def test_faults_of_a_key_file_show_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\nelse secret\nsecret of three\n")
    message = fault("http://x", keys=file)
    assert "secret" not in message
    assert len(message.splitlines()) == 3


def test_feeds_of_kv_events() -> None:
    feed = "kv-events=tcp://127.0.0.1:5557"
    one, two, three = addresses(
        f"http://x,{feed}", f"b=http://y/v1,{feed},kv-replay=tcp://[::1]:5558", "http://z"
    )
    assert (one.url, one.kv_events, one.kv_replay) == ("http://x", "tcp://127.0.0.1:5557", "")
    assert (two.name, two.url, two.kv_replay) == ("b", "http://y", "tcp://[::1]:5558")
    assert three.kv_events == ""


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ("kv-events=127.0.0.1:5557", "kv-events is not tcp://HOST:PORT"),
        ("kv-events=tcp://*:5557", "kv-events is not tcp://HOST:PORT"),
        ("kv-events=tcp://x:0", "kv-events is not tcp://HOST:PORT"),
        ("kv-events=tcp://x:99999", "kv-events is not tcp://HOST:PORT"),
        ("kv-events", "kv-events is not tcp://HOST:PORT"),
        ("role=prefill", "unknown option 'role' after its address"),
        ("kv-replay=tcp://x:1", "kv-replay without kv-events"),
        ("kv-events=tcp://x:1,kv-events=tcp://x:2", "kv-events is named twice"),
    ],
)
def test_what_is_no_feed(options: str, wrong: str) -> None:
    assert fault(f"http://x,{options}") == f"engine e0: {wrong}"
