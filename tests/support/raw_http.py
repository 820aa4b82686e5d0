"""HTTP written and read byte by byte, for what no client library would send."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any, BinaryIO

from support.fake_engine import MODEL_NAME
from support.http_server import RunningServer

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}]}


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

    def __init__(
        self, sock: socket.socket, *, has_body: bool = True, file: BinaryIO | None = None
    ) -> None:
        """`file` is the socket's, where more responses follow."""
        with nullcontext(file) if file else closing(sock.makefile("rb")) as file:
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


def replies_of(sock: socket.socket, count: int) -> list[Reply]:
    """So many responses, one behind another."""
    with closing(sock.makefile("rb")) as file:
        return [Reply(sock, file=file) for _ in range(count)]


def ask(server: RunningServer, data: bytes) -> Reply:
    with closing(connect(server)) as sock:
        sock.sendall(data)
        return Reply(sock, has_body=not data.startswith(b"HEAD"))


def seen_until(sock: socket.socket, end: bytes, seen: bytes = b"") -> bytes:
    """What has come when `end` has, in however many pieces."""
    while end not in seen:
        data = sock.recv(1 << 16)
        assert data, f"the connection ended before {end!r}"
        seen += data
    return seen


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
