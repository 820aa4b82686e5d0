"""What goes over the wire, byte by byte: framing, limits, errors, clients that misbehave."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from headrace.server import connection
from support.fake_engine import MODEL_NAME, FakeBooted, formula_model
from support.http_server import RunningServer, running_server

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def booted() -> Iterator[FakeBooted]:
    with formula_model() as booted:
        yield booted


@pytest.fixture(scope="module")
def server(booted: FakeBooted) -> Iterator[RunningServer]:
    with running_server(booted, max_body_bytes=64 << 10, stream_buffer_bytes=1024) as running:
        yield running


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def request_bytes(
    path: str, body: bytes = b"", method: str = "POST", headers: dict[str, str] | None = None
) -> bytes:
    fields = {"host": "x", "content-type": "application/json", "content-length": str(len(body))}
    fields |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items() if v)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Reply:
    """One response, read to its end."""

    def __init__(self, sock: socket.socket, *, has_body: bool = True) -> None:
        file = sock.makefile("rb")
        with closing(file):
            self.status = int(file.readline().split()[1])
            self.headers: dict[str, str] = {}
            while (line := file.readline().strip()) != b"":
                name, _, value = line.decode().partition(":")
                self.headers[name.lower()] = value.strip()
            self.chunks: list[bytes] = []
            if self.headers.get("transfer-encoding") == "chunked":
                while (size := int(file.readline(), 16)) > 0:
                    self.chunks.append(file.read(size))
                    file.readline()
                file.readline()
            elif has_body:
                self.chunks.append(file.read(int(self.headers["content-length"])))

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        (name,) = self.json
        assert name == "error"
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def ask(server: RunningServer, data: bytes) -> Reply:
    with closing(connect(server)) as sock:
        sock.sendall(data)
        return Reply(sock, has_body=not data.startswith(b"HEAD"))


def rest_of(sock: socket.socket) -> bytes:
    """All that comes until the connection ends, in whatever way."""
    seen = b""
    try:
        while data := sock.recv(1 << 20):
            seen += data
    except ConnectionError:
        pass
    return seen


def send_until_cut(sock: socket.socket, piece: bytes, times: int, pause_s: float = 0.0) -> int:
    """How often it could be sent before the other side had closed the connection."""
    for count in range(times):
        try:
            sock.sendall(piece)
        except OSError:
            return count
        time.sleep(pause_s)
    return times


def post(server: RunningServer, fields: dict[str, Any], path: str = CHAT) -> Reply:
    return ask(server, request_bytes(path, json.dumps(fields).encode()))


def get(server: RunningServer, path: str) -> Reply:
    return ask(server, request_bytes(path, method="GET"))


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "it did not come about"
        time.sleep(0.002)


def is_idle(server: RunningServer) -> bool:
    stats = server.booted.engine.stats()
    return (stats.num_running, stats.num_waiting, server.service.num_deliveries) == (0, 0, 0)


# ---- framing


def test_the_frames_of_a_stream(server: RunningServer) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
    reply = post(server, HELLO | options)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.body.endswith(b"\n\ndata: [DONE]\n\n")
    events = reply.body.decode().split("\n\n")[:-1]
    assert all(event.startswith("data: ") for event in events)
    assert events.count("data: [DONE]") == 1
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    finishes = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert finishes == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_without_usage_there_is_none(server: RunningServer) -> None:
    body = post(server, HELLO | {"stream": True, "max_tokens": 2}).body
    assert b"usage" not in body


def test_a_connection_serves_many_requests(server: RunningServer) -> None:
    with closing(connect(server)) as sock:
        for stream in (False, True, False):
            fields = HELLO | {"max_tokens": 2, "stream": stream}
            sock.sendall(request_bytes(CHAT, json.dumps(fields).encode()))
            assert Reply(sock).status == 200


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    with closing(connect(server)) as sock:
        many = [HELLO | {"max_tokens": n} for n in (5, 1, 3)]
        sock.sendall(b"".join(request_bytes(CHAT, json.dumps(one).encode()) for one in many))
        counts = []
        file = sock.makefile("rb")
        with closing(file):
            for _ in many:
                length = 0
                while (line := file.readline().strip()) != b"":
                    if line.startswith(b"content-length"):
                        length = int(line.split(b":")[1])
                counts.append(json.loads(file.read(length))["usage"]["completion_tokens"])
    assert counts == [5, 1, 3]


def test_a_waiting_stream_is_kept_alive(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.sse.KEEP_ALIVE_S", 0.02)
    gate = server.booted.executor.gate
    gate.clear()
    try:
        with closing(connect(server)) as sock:
            fields = HELLO | {"stream": True, "max_tokens": 2}
            sock.sendall(request_bytes(CHAT, json.dumps(fields).encode()))
            seen = b""
            while seen.count(b": keep-alive\n\n") < 2:
                seen += sock.recv(4096)
            assert b"200 OK" in seen
            assert b"data:" not in seen
            gate.set()
            while b"[DONE]" not in seen:
                seen += sock.recv(4096)
    finally:
        gate.set()


# ---- state


def test_the_state_routes(server: RunningServer) -> None:
    assert get(server, "/health").json == {"status": "open"}
    assert get(server, "/ready").json == {"status": "open"}
    assert set(get(server, "/version").json) == {"version"}
    card = get(server, "/v1/models").json["data"][0]
    assert card["id"] == MODEL_NAME
    assert card["max_model_len"] == 2048
    assert ask(server, request_bytes("/health", method="HEAD")).status == 200


# ---- errors


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"{} x",
        b'{"messages": NaN}',
        b'{"messages": [], "temperature": 1e400}',
        b'{"messages": [], "temperature": Infinity}',
        b'{"messages": [], "n": ' + b"9" * 5000 + b"}",
        b'{"x": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"messages": ' + b"[" * 60_000,
        b"\xff\xfe\x00",
        b"\xef\xbb\xbf{}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_body_that_is_not_a_request(server: RunningServer, body: bytes) -> None:
    begin = time.perf_counter()
    reply = ask(server, request_bytes(CHAT, body))
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert time.perf_counter() - begin < 1


def test_a_byte_order_mark_is_named(server: RunningServer) -> None:
    reply = ask(server, request_bytes(CHAT, b"\xef\xbb\xbf{}"))
    assert "byte order mark" in reply.error["message"]


def test_of_two_equal_keys_the_last_counts(server: RunningServer) -> None:
    body = json.dumps(HELLO).encode()[:-1] + b', "max_tokens": 9, "max_tokens": 2}'
    assert ask(server, request_bytes(CHAT, body)).json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("/", "GET", 404, "not_found"),
        ("/v1/models/", "GET", 404, "not_found"),
        ("/v1/embeddings", "POST", 404, "not_found"),
        ("/v1/models/other", "GET", 404, "model_not_found"),
        (CHAT, "GET", 405, "method_not_allowed"),
        ("/health", "POST", 405, "method_not_allowed"),
    ],
)
def test_a_wrong_route_or_method(
    server: RunningServer, path: str, method: str, status: int, code: str
) -> None:
    reply = ask(server, request_bytes(path, method=method))
    assert (reply.status, reply.error["code"]) == (status, code)
    if status == 405:
        assert reply.headers["allow"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-encoding": "gzip"},
    ],
)
def test_a_wrong_content_type(server: RunningServer, headers: dict[str, str]) -> None:
    reply = ask(server, request_bytes(CHAT, json.dumps(HELLO).encode(), headers=headers))
    assert reply.status == 415
    assert reply.error["code"] == "unsupported_media_type"


def test_a_body_without_content_type_is_json(server: RunningServer) -> None:
    body = json.dumps(HELLO | {"max_tokens": 1}).encode()
    assert ask(server, request_bytes(CHAT, body, headers={"content-type": ""})).status == 200


# ---- limits


def test_a_declared_body_that_is_too_large(server: RunningServer) -> None:
    reply = ask(server, request_bytes(CHAT, headers={"content-length": "10000000000"}))
    assert reply.status == 413
    assert str(64 << 10) in reply.error["message"]


def test_a_chunked_body_is_cut_off_while_it_is_read(server: RunningServer) -> None:
    head = request_bytes(CHAT, headers={"content-length": "", "transfer-encoding": "chunked"})
    with closing(connect(server)) as sock:
        sock.sendall(head)
        chunk = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
        for _ in range(17):
            sock.sendall(chunk)
        assert Reply(sock).status == 413


def test_what_is_sent_after_the_answer_is_bounded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_UNREAD_BODY_BYTES", 1 << 20)
    with closing(connect(server)) as sock:
        sock.sendall(request_bytes(CHAT, headers={"content-length": "10000000000"}))
        assert Reply(sock).status == 413
        assert send_until_cut(sock, b"x" * 65536, 1000) < 1000


def test_headers_that_are_too_large(server: RunningServer) -> None:
    for headers in ({"x": "y" * 40_000}, {f"x-{i}": "y" * 1000 for i in range(40)}):
        reply = ask(server, request_bytes("/health", method="GET", headers=headers))
        assert reply.status == 431
        assert reply.error["code"] == "headers_too_large"
    reply = ask(server, request_bytes("/" + "x" * 40_000, method="GET"))
    assert reply.status == 431


def test_what_is_not_http(server: RunningServer) -> None:
    reply = ask(server, b"\x16\x03\x01 hello\r\n\r\n")
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


def test_headers_must_arrive_in_time(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.Connection, "head_timeout_s", 0.2)
    with closing(connect(server)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: ")
        # Byte by byte: each one resets what only measures silence.
        assert send_until_cut(sock, b"x", 200, pause_s=0.01) < 100


def test_too_many_pipelined_requests_end_the_connection(server: RunningServer) -> None:
    gate = server.booted.executor.gate
    gate.clear()
    try:
        with closing(connect(server)) as sock:
            body = json.dumps(HELLO | {"max_tokens": 1}).encode()
            sock.sendall(request_bytes(CHAT, body) * 12)
            assert rest_of(sock) == b""
    finally:
        gate.set()
    eventually(lambda: is_idle(server))


# ---- clients that leave


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
