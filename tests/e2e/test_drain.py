"""How a server ends: at once for new requests, in peace for running ones, by signal or by force."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.config.schema import ServerConfig
from headrace.server import run
from headrace.server.app import create_app
from headrace.server.listener import bind, url_of
from headrace.server.run import HttpServer
from support.fake_engine import MODEL_NAME, FakeBooted, formula_model
from support.http_server import RunningServer

HELLO = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def booted() -> Iterator[FakeBooted]:
    with formula_model() as booted:
        yield booted


def post(sock: socket.socket, **fields: Any) -> None:
    body = json.dumps(HELLO | fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)


def get(sock: socket.socket, path: str) -> None:
    sock.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())


def until(sock: socket.socket, end: bytes) -> bytes:
    seen = b""
    while end not in seen and (data := sock.recv(65536)):
        seen += data
    return seen


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def begun_stream(server: RunningServer, **fields: Any) -> socket.socket:
    """A stream of which the first chunk has come."""
    sock = connect(server.port)
    post(sock, stream=True, **fields)
    until(sock, b"data: ")
    return sock


def test_a_drain_lets_answers_finish_and_nobody_in(booted: FakeBooted) -> None:
    booted.executor.step_s = 0.005
    server = RunningServer(booted, drain_timeout_s=30.0)
    with closing(begun_stream(server, max_tokens=100)) as stream:
        server.server.stop()
        with closing(connect(server.port)) as late:
            get(late, "/ready")
            refused = until(late, b"}")
            assert b" 503 " in refused
            assert b"retry-after: " in refused
            assert b"draining" in refused
        with closing(connect(server.port)) as late:
            post(late)
            refused = until(late, b"}}")
            assert b" 503 " in refused
            assert b"retry-after: " in refused
        assert b"data: [DONE]\n\n" in until(stream, b"\r\n0\r\n\r\n")
    server.join()
    with pytest.raises(ConnectionRefusedError):
        connect(server.port)
    booted.engine.check()


@pytest.mark.parametrize("stream", [False, True])
def test_after_the_drain_time_answers_end_with_an_error(booted: FakeBooted, stream: bool) -> None:
    server = RunningServer(booted, drain_timeout_s=0.1)
    booted.executor.step_s = 0.005
    with closing(connect(server.port)) as sock:
        post(sock, stream=stream)
        while booted.engine.stats().num_running == 0:
            time.sleep(0.002)
        if stream:
            until(sock, b"data: ")
        server.server.stop()
        seen = until(sock, b'"overloaded"')
        seen += until(sock, b"nothing that comes")
    assert b"the server is shutting down" in seen
    assert b"[DONE]" not in seen
    if stream:
        assert seen.endswith(b"}}\n\n\r\n0\r\n\r\n")
    else:
        assert b" 503 " in seen
    server.join()
    booted.engine.check()
    assert booted.engine.stats().num_running == 0


def test_a_second_stop_does_not_wait_and_answers_end_with_an_error(booted: FakeBooted) -> None:
    server = RunningServer(booted, drain_timeout_s=60.0)
    booted.executor.step_s = 0.01
    with closing(begun_stream(server)) as stream, closing(connect(server.port)) as whole:
        post(whole)
        while booted.engine.stats().num_running < 2:
            time.sleep(0.002)
        begin = time.monotonic()
        server.server.stop()
        server.server.stop()
        seen = until(stream, b"nothing that comes")
        assert b"the server is shutting down" in seen
        assert seen.endswith(b"}}\n\n\r\n0\r\n\r\n")
        assert b" 503 " in until(whole, b"nothing that comes")
        server.join()
        assert time.monotonic() - begin < 5
    booted.engine.check()


@pytest.mark.parametrize(("num_stops", "is_waited_for"), [(1, True), (2, True), (3, False)])
def test_who_is_slow_is_waited_for_shortly_or_cut_off(
    booted: FakeBooted, num_stops: int, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a request of which the rest does not come, that no drain knows of."""
    monkeypatch.setattr(run, "LAST_WORDS_S", 1)
    server = RunningServer(booted, drain_timeout_s=60.0)
    with closing(connect(server.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        time.sleep(0.1)
        begin = time.monotonic()
        for _ in range(num_stops):
            server.server.stop()
        server.join()
        assert (time.monotonic() - begin > 0.9) == is_waited_for
        assert time.monotonic() - begin < 5


def test_an_idle_server_stops_at_once(booted: FakeBooted) -> None:
    server = RunningServer(booted, drain_timeout_s=60.0)
    with closing(connect(server.port)) as idle:
        get(idle, "/health")
        assert b" 200 " in until(idle, b"}")
        begin = time.monotonic()
        server.stop()
        assert time.monotonic() - begin < 3


def test_a_port_that_is_taken(booted: FakeBooted) -> None:
    with closing(bind("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError) as caught:
            bind("127.0.0.1", port)
    assert str(port) in caught.value.message
    assert "\n" not in caught.value.message
    with pytest.raises(ConfigError):
        bind("no.such.host.invalid", 0)


def test_the_door_opens_when_the_model_is_there(booted: FakeBooted) -> None:
    server = RunningServer(booted, is_attached=False)
    with closing(connect(server.port)) as sock:
        get(sock, "/ready")
        assert b"loading" in until(sock, b"}")
        get(sock, "/health")
        assert b" 200 " in until(sock, b"}")
        post(sock)
        assert b"still loading" in until(sock, b"}}")
        server.service.waits_for = "w0 starts"
        get(sock, "/ready")
        assert b'{"status":"loading","detail":"waiting for workers: w0 starts"}' in until(
            sock, b"}"
        )
        post(sock)
        assert b"the server is waiting for its workers" in until(sock, b"}}")
        server.attach()
        get(sock, "/ready")
        assert b'"open"' in until(sock, b"}")
    server.stop()


def test_what_loading_raises_is_raised(booted: FakeBooted) -> None:
    server = RunningServer(booted, is_attached=False)
    server.stop()
    config = server.config

    def boot() -> Any:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        HttpServer(create_app(None, config), config).run(boot=boot)


CHILD = """
import sys
sys.path[:0] = ["src", "tests"]
from support.fake_engine import formula_model
from headrace.core.config.schema import ServerConfig
from headrace.server.app import create_app
from headrace.server.run import run_server
with formula_model() as booted:
    booted.executor.step_s = 0.005
    config = ServerConfig(port=0, drain_timeout_s=20)
    run_server(
        create_app(booted, config),
        config,
        on_ready=lambda url: print(url, flush=True),
        on_drain=lambda num_answers: print("waiting for", num_answers, flush=True),
    )
    booted.engine.check()
    if "slowly" in sys.argv:
        print("closing", flush=True)
        sys.stdin.readline()
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_a_process(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline().decode().rsplit(":", 1)[1])
        with closing(connect(port)) as sock:
            post(sock, stream=True, max_tokens=60)
            until(sock, b"data: ")
            os.kill(child.pid, number)
            assert b"[DONE]" in until(sock, b"[DONE]")
        out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err.decode()
    assert out == b"waiting for 1\nended\n"
    assert err == b""


def test_nobody_is_waited_for_where_nobody_is_served() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=30) == (b"ended\n", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_drain_changes_nothing(number: signal.Signals) -> None:
    """The server has stopped, and what it served is still being closed."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, "slowly"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(number)
        assert child.stdout.readline() == b"closing\n"
        child.send_signal(number)
        assert child.communicate(b"\n", timeout=30) == (b"ended\n", b"")
    assert child.returncode == 0


def test_a_stop_before_the_start_counts() -> None:
    config = ServerConfig(port=0)
    server = HttpServer(create_app(None, config), config)
    server.stop()
    server.run()
    server.stop()
