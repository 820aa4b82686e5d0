"""Clients of HTTP/1.0, and such as end their sending side: at a server, and at a gateway."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from support.fake_engine import FakeBooted
from support.gateway import RunningGateway, running_gateway
from support.http_server import RunningServer
from support.raw_http import (
    CHAT,
    HELLO,
    Reply,
    eventually,
    is_idle,
    request_bytes,
    rest_of,
    seen_until,
)

STREAM = HELLO | {"stream": True, "max_tokens": 3}
WHOLE = HELLO | {"max_tokens": 3}
LONG = {"max_tokens": 2000}  # longer than any of these tests
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    with running_gateway(server.url) as running:
        yield running


@pytest.fixture(params=["server", "gateway"])
def port(request: pytest.FixtureRequest) -> int:
    running: RunningServer | RunningGateway = request.getfixturevalue(request.param)
    return running.port


def sent(port: int, fields: dict[str, Any], *, version: str = "1.1") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    data = request_bytes(CHAT, json.dumps(fields).encode())
    sock.sendall(data.replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1))
    return sock


def answer_of(sock: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of an answer that ends with the connection."""
    head, _, body = rest_of(sock).partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.fixture
def held(booted: FakeBooted) -> Iterator[Callable[[], None]]:
    """No step ends before this is called."""
    booted.executor.gate.clear()
    yield booted.executor.gate.set
    booted.executor.gate.set()


# ---- HTTP/1.0


@pytest.mark.parametrize("fields", [STREAM, WHOLE], ids=["stream", "whole"])
def test_an_old_client_gets_a_plain_body_and_the_end_of_the_connection(
    port: int, fields: dict[str, Any]
) -> None:
    with closing(sent(port, fields, version="1.0")) as sock:
        head, body = answer_of(sock)
    assert head.startswith(b"http/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if fields is STREAM:
        assert body.startswith(b"data: {")
        assert body.endswith(b"}\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"][0]["finish_reason"] == "length"


def test_an_old_client_that_ends_its_side_has_its_answer(
    port: int, held: Callable[[], None]
) -> None:
    with closing(sent(port, WHOLE, version="1.0")) as sock:
        sock.shutdown(socket.SHUT_WR)
        threading.Timer(0.1, held).start()
        head, body = answer_of(sock)
    assert head.startswith(b"http/1.1 200 ")  # without an interim answer, which it does not know
    assert json.loads(body)["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_an_old_client_that_leaves_is_computed_for_a_minute_at_most(
    port: int, server: RunningServer
) -> None:
    """So long its system answers for it (`tcp_fin_timeout`)."""
    server.booted.executor.step_s = 0.06  # two minutes for all of it
    try:
        with closing(sent(port, HELLO | LONG, version="1.0")):
            eventually(lambda: server.booted.engine.stats().num_running == 1)
        eventually(lambda: is_idle(server), timeout_s=80.0)
    finally:
        server.booted.executor.step_s = 0.0


# ---- a client that ends its sending side


@pytest.mark.parametrize("fields", [STREAM, WHOLE], ids=["stream", "whole"])
def test_whoever_ends_its_side_while_it_waits_has_its_answer(
    port: int, fields: dict[str, Any], held: Callable[[], None]
) -> None:
    with closing(sent(port, fields)) as sock:
        sock.shutdown(socket.SHUT_WR)
        if fields is WHOLE:
            assert seen_until(sock, b"\r\n\r\n") == CONTINUE
        held()
        data = rest_of(sock).removeprefix(CONTINUE)
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in data or fields is STREAM
    assert data.endswith(b"\r\n0\r\n\r\n" if fields is STREAM else b"}")


def test_whoever_ends_its_side_amid_a_stream_has_the_rest(port: int, booted: FakeBooted) -> None:
    with closing(sent(port, STREAM | {"max_tokens": 40})) as sock:
        seen = seen_until(sock, b"data: ")
        sock.shutdown(socket.SHUT_WR)
        data = seen + rest_of(sock)
    # A comment, which asks whether the client is there, may stand behind any event.
    assert data.replace(b"3\r\n:\n\n\r\n", b"").endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_all_that_was_pipelined_is_answered(port: int, held: Callable[[], None]) -> None:
    data = request_bytes(CHAT, json.dumps(WHOLE).encode())
    with closing(socket.create_connection(("127.0.0.1", port), timeout=10)) as sock:
        sock.sendall(data * 3 + data[:-5])
        sock.shutdown(socket.SHUT_WR)
        assert seen_until(sock, b"\r\n\r\n") == CONTINUE
        held()
        with closing(sock.makefile("rb")) as file:
            replies = [Reply(sock, file=file) for _ in range(3)]
            assert file.read() == b""
    assert [one.status for one in replies] == [200] * 3
    assert [one.headers.get("connection") for one in replies] == [None, None, "close"]


def test_half_a_request_is_none(port: int) -> None:
    with closing(sent(port, WHOLE)) as sock:
        Reply(sock)
        sock.sendall(request_bytes(CHAT, json.dumps(WHOLE).encode())[:-5])
        sock.shutdown(socket.SHUT_WR)
        assert rest_of(sock) == b""


def test_a_usual_client_takes_an_interim_answer(port: int, held: Callable[[], None]) -> None:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with closing(client):
        client.request("POST", CHAT, json.dumps(WHOLE), {"content-type": "application/json"})
        client.sock.shutdown(socket.SHUT_WR)
        threading.Timer(0.1, held).start()
        with client.getresponse() as response:
            assert json.loads(response.read())["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("leaves", ["at once", "later"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_whoever_is_gone_is_computed_for_no_longer(
    port: int,
    server: RunningServer,
    stream: bool,
    leaves: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though its last word is the same as that of one who waits."""
    monkeypatch.setattr("headrace.server.half_closed.PROBE_S", 0.1)
    monkeypatch.setattr("headrace.server.half_closed.LOOK_S", 0.02)
    server.booted.executor.step_s = 0.01  # 20 s for all of it
    try:
        sock = sent(port, HELLO | LONG | {"stream": stream})
        eventually(lambda: server.booted.engine.stats().num_running == 1)
        if leaves == "later":
            sock.shutdown(socket.SHUT_WR)
            eventually(lambda: sock.recv(1, socket.MSG_PEEK) != b"")
        sock.close()
        eventually(lambda: is_idle(server))
    finally:
        server.booted.executor.step_s = 0.0
