"""An OpenAI-compatible server that misbehaves as it is told, byte by byte."""

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

MODEL = "stub"


@dataclass
class Asked:
    """A request as the engine has seen it."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Behaviour = Callable[[socket.socket, Asked], None]


@dataclass
class Stub:
    """`behave` answers a POST; the rest is what GET routes say. `health` 0 = not one answer."""

    behave: Behaviour
    models: tuple[str, ...] = (MODEL,)
    page: str = ""
    health: int = 200
    asked: list[Asked] = field(default_factory=list)
    num_left: int = 0  # clients that closed their connection while they were answered
    url: str = ""
    is_closing: threading.Event = field(default_factory=threading.Event)

    def get(self, sock: socket.socket, asked: Asked) -> None:
        if self.health == 0:
            self.is_closing.wait(30)
        elif asked.path == "/health":
            sock.sendall(answer(self.health, b""))
        elif asked.path == "/v1/models":
            cards = [{"id": name, "object": "model"} for name in self.models]
            sock.sendall(answer(200, json.dumps({"object": "list", "data": cards}).encode()))
        elif asked.path == "/metrics" and self.page:
            sock.sendall(answer(200, self.page.encode()))
        else:
            sock.sendall(answer(404, b""))


@contextmanager
def stub_engine(behave: Behaviour, *, port: int = 0, **facts: Any) -> Iterator[Stub]:
    stub = Stub(behave, **facts)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            sock: socket.socket = self.request
            with suppress(OSError, ValueError):
                asked = read_request(sock)
                if asked.headers[":method"] == "GET":
                    stub.get(sock, asked)
                    return
                stub.asked.append(asked)
                try:
                    stub.behave(sock, asked)
                except OSError:
                    stub.num_left += 1

    server = _Server(("127.0.0.1", port), Handler)
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.is_closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256


def read_request(sock: socket.socket) -> Asked:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(sock)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    method, path, _ = first.split(" ")
    headers[":method"] = method
    while len(body) < int(headers.get("content-length", 0)):
        body += _more(sock)
    return Asked(path, headers, body)


def _more(sock: socket.socket) -> bytes:
    data = sock.recv(1 << 16)
    if not data:
        raise ConnectionError
    return data


# ---- answers


def answer(status: int, body: bytes, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str) -> bytes:
    choice = {"index": 0, "text": text, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"


# ---- behaviours


def says(status: int, body: bytes, **headers: str) -> Behaviour:
    return lambda sock, asked: sock.sendall(answer(status, body, **headers))


def streams(*texts: str, pause_s: float = 0.0) -> Behaviour:
    def behave(sock: socket.socket, asked: Asked) -> None:
        sock.sendall(STREAM_HEAD)
        for text in texts:
            sock.sendall(chunk(event(text)))
            time.sleep(pause_s)
        sock.sendall(chunk(DONE) + LAST_CHUNK)

    return behave


def sends(*pieces: bytes) -> Behaviour:
    """Whatever these are, and then the connection's end."""

    def behave(sock: socket.socket, asked: Asked) -> None:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.02)  # so that they arrive apart

    return behave


def hangs(after: bytes = b"") -> Behaviour:
    """Nothing more, until the other side closes."""

    def behave(sock: socket.socket, asked: Asked) -> None:
        sock.sendall(after)
        _more(sock)

    return behave


def sends_headers_for_ever(sock: socket.socket, asked: Asked) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        sock.sendall(b"x-more: " + b"y" * 1000 + b"\r\n")
