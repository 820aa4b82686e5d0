"""Clients that leave, and one that does not read."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from support.fake_engine import FakeBooted
from support.http_server import RunningServer, running_server
from support.raw_http import (
    CHAT,
    HELLO,
    connect,
    eventually,
    is_idle,
    post,
    request_bytes,
    rest_of,
)


@pytest.fixture(scope="module")
def server(booted: FakeBooted) -> Iterator[RunningServer]:
    with running_server(booted, max_body_bytes=64 << 10, stream_buffer_bytes=1024) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pipelined", [1, 2])
def test_a_client_that_leaves_frees_everything(
    server: RunningServer, stream: bool, pipelined: int
) -> None:
    executor = server.booted.executor
    executor.step_s = 0.001
    try:
        with closing(connect(server)) as sock:
            body = json.dumps(HELLO | {"stream": stream, "n": 3}).encode()
            sock.sendall(request_bytes(CHAT, body) * pipelined)
            eventually(lambda: server.booted.engine.stats().num_running == 3)
        num_steps = executor.num_steps
        eventually(lambda: is_idle(server))
        assert executor.num_steps - num_steps < 500  # of the 2,000 that the answers would take
    finally:
        executor.step_s = 0.0
    server.booted.engine.check()
    server.service.metrics.check()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits(server: RunningServer, stream: bool) -> None:
    executor = server.booted.executor
    executor.gate.clear()
    try:
        with closing(connect(server)) as first, closing(connect(server)) as second:
            body = json.dumps(HELLO | {"stream": stream, "max_tokens": 3}).encode()
            first.sendall(request_bytes(CHAT, body))
            eventually(lambda: server.service.num_deliveries == 1)
            second.sendall(request_bytes(CHAT, body))
            eventually(lambda: server.service.num_deliveries == 2)
        # No step has ended since; the server has let go of both all the same.
        eventually(lambda: server.service.num_deliveries == 0)
    finally:
        executor.gate.set()
    eventually(lambda: is_idle(server))
    server.booted.engine.check()


def test_a_slow_reader_is_cut_and_nobody_else(server: RunningServer) -> None:
    with closing(socket.socket()) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(10)
        slow.connect(("127.0.0.1", server.port))
        body = json.dumps(HELLO | {"stream": True, "n": 32}).encode()
        slow.sendall(request_bytes(CHAT, body))
        eventually(lambda: server.booted.engine.stats().num_running > 0)
        other = post(server, HELLO | {"max_tokens": 50, "seed": 1})
        assert other.json["usage"]["completion_tokens"] == 50
        eventually(lambda: is_idle(server), timeout_s=20)
        seen = rest_of(slow)
        assert seen.startswith(b"HTTP/1.1 200 OK")
        assert b"[DONE]" not in seen
        assert not seen.endswith(b"0\r\n\r\n")
    server.booted.engine.check()
