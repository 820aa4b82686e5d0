"""What goes over the wire, byte by byte: framing, limits, errors."""

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from headrace.server import connection
from support.fake_engine import MODEL_NAME, FakeBooted
from support.http_server import RunningServer, running_server
from support.raw_http import (
    CHAT,
    HELLO,
    Reply,
    ask,
    connect,
    eventually,
    get,
    is_idle,
    post,
    replies_of,
    request_bytes,
    rest_of,
    seen_until,
    send_until_cut,
)


@pytest.fixture(scope="module")
def server(booted: FakeBooted) -> Iterator[RunningServer]:
    with running_server(booted, max_body_bytes=64 << 10, stream_buffer_bytes=1024) as running:
        yield running


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


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_a_stream_that_ends_with_its_connection_says_nothing_else(
    server: RunningServer, version: bytes
) -> None:
    body = json.dumps(HELLO | {"max_tokens": 3, "stream": True}).encode()
    data = request_bytes(CHAT, body, headers={"connection": "close"})
    with closing(connect(server)) as sock:
        sock.sendall(data.replace(b"HTTP/1.1", version, 1))
        head, _, rest = rest_of(sock).partition(b"\r\n\r\n")
    assert [line for line in head.split(b"\r\n") if line.startswith(b"connection:")] == [
        b"connection: close"
    ]
    assert b"data: [DONE]" in rest


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
            seen_until(sock, b"[DONE]")
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
    assert reply.error["message"] == "the body is larger than 64KiB"


def test_a_chunked_body_is_cut_off_while_it_is_read(server: RunningServer) -> None:
    head = request_bytes(CHAT, headers={"content-length": "", "transfer-encoding": "chunked"})
    with closing(connect(server)) as sock:
        sock.sendall(head)
        chunk = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
        for _ in range(17):
            sock.sendall(chunk)
        assert Reply(sock).status == 413


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip\r\ntransfer-encoding: chunked", "gzip"])
def test_a_body_that_is_encoded_further_is_refused(server: RunningServer, coding: str) -> None:
    """Its chunks are not what it says; whoever is before this server may have read it otherwise."""
    head = request_bytes(CHAT, headers={"content-length": "", "transfer-encoding": coding})
    reply = ask(server, head + b"3\r\nabc\r\n0\r\n\r\n")
    assert (reply.status, reply.headers["connection"]) == (501, "close")
    assert reply.error["code"] == "unsupported_transfer_coding"
    assert "transfer-encoding 'gzip" in str(reply.error["message"])
    body = json.dumps(HELLO | {"max_tokens": 1}).encode()
    head = request_bytes(CHAT, headers={"content-length": "", "transfer-encoding": " Chunked "})
    reply = ask(server, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    assert reply.status == 200


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


@pytest.mark.parametrize("is_idle_before", [True, False])
def test_later_headers_must_arrive_in_time_too(
    server: RunningServer, is_idle_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle connections are kept for longer, but only while they are idle."""
    monkeypatch.setattr(connection.Connection, "head_timeout_s", 0.2)
    gate = server.booted.executor.gate
    gate.clear()
    try:
        with closing(connect(server)) as sock:
            asked = request_bytes(CHAT, json.dumps(HELLO | {"max_tokens": 1}).encode())
            begun = b"GET /health HTTP/1.1\r\nhost: "
            sock.sendall(asked if is_idle_before else asked + begun)
            eventually(lambda: not is_idle(server))
            gate.set()
            assert Reply(sock).status == 200
            if is_idle_before:
                time.sleep(0.3)
                sock.sendall(begun)
            assert send_until_cut(sock, b"x", 200, pause_s=0.01) < 100
    finally:
        gate.set()


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("connection", ["Upgrade, HTTP2-Settings", "upgrade, close"])
def test_an_upgrade_that_is_offered_is_passed_over(
    server: RunningServer, is_apart: bool, connection: str
) -> None:
    offer = {"connection": connection, "upgrade": "h2c", "http2-settings": "AAMAAABk"}
    body = json.dumps(HELLO | {"max_tokens": 3}).encode()
    data = request_bytes(CHAT, body, headers=offer)
    with closing(connect(server)) as sock:
        if is_apart:  # the body would be the next request
            sock.sendall(data[: -len(body)])
            time.sleep(0.1)
            sock.sendall(body)
        else:
            sock.sendall(data * 2)
        replies = replies_of(sock, 1 if is_apart or "close" in connection else 2)
        assert [one.status for one in replies] == [200] * len(replies)
        assert ("close" in connection) == (replies[0].headers.get("connection") == "close")


def test_trailers_are_no_headers(server: RunningServer) -> None:
    body = json.dumps(HELLO | {"max_tokens": 3}).encode()
    chunked = {"content-length": "", "transfer-encoding": "chunked"}
    rest = b"%x\r\n%b\r\n0\r\nx-request-id: evil\r\n\r\n" % (len(body), body)
    reply = ask(server, request_bytes(CHAT, headers=chunked) + rest)
    assert reply.status == 200
    assert reply.headers["x-request-id"] != "evil"


def test_many_pipelined_requests_are_all_answered(server: RunningServer) -> None:
    with closing(connect(server)) as sock:
        body = json.dumps(HELLO | {"max_tokens": 1}).encode()
        sock.sendall(request_bytes(CHAT, body) * (connection.MAX_PIPELINED + 1))
        replies = replies_of(sock, connection.MAX_PIPELINED + 1)
        assert {(reply.status, reply.headers.get("connection")) for reply in replies} == {
            (200, None)
        }
        sock.sendall(request_bytes(CHAT, body))
        assert Reply(sock).status == 200


def test_whoever_leaves_behind_a_long_body_is_noticed(server: RunningServer) -> None:
    server.booted.executor.step_s = 0.01  # 20 s for all of it
    try:
        with closing(connect(server)) as sock:
            sock.sendall(request_bytes(CHAT, json.dumps(HELLO | {"max_tokens": 1900}).encode()))
            eventually(lambda: server.booted.engine.stats().num_running == 1)
            sock.sendall(request_bytes(CHAT, b" " * (200 << 10)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: is_idle(server))
    finally:
        server.booted.executor.step_s = 0.0


CHUNKED = {"content-length": "", "transfer-encoding": "chunked"}


@pytest.mark.parametrize(
    ("behind", "num_before"),
    [
        (request_bytes("/health", method="GET") * 500, connection.MAX_PIPELINED + 1),
        (b"what is this?\r\n\r\n", 3),
        (request_bytes("/health", method="GET", headers={"x": "y" * (33 << 10)}), 3),
        (request_bytes(CHAT, headers=CHUNKED) + b"no size\r\n", 3),
        (request_bytes(CHAT, b" " * (65 << 10)), 3),
    ],
    ids=["too many", "no HTTP", "large headers", "broken body", "long body"],
)
def test_what_cannot_be_taken_lets_those_before_it_be_answered(
    server: RunningServer, behind: bytes, num_before: int
) -> None:
    """The last answer says that the connection ends, so that the client sends the rest again."""
    gate = server.booted.executor.gate
    gate.clear()
    try:
        with closing(connect(server)) as sock:
            body = json.dumps(HELLO | {"max_tokens": 1}).encode()
            sock.sendall(request_bytes(CHAT, body) * num_before + behind)
            gate.set()
            replies = replies_of(sock, num_before)
            assert rest_of(sock) == b""
    finally:
        gate.set()
    assert [reply.status for reply in replies] == [200] * num_before
    assert [reply.headers.get("connection") for reply in replies] == (
        [None] * (num_before - 1) + ["close"]
    )
    eventually(lambda: is_idle(server))
