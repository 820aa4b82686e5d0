"""`headrace role` says what a server has done, or why it has not, whoever answers there."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.cli.main import main

Capture = pytest.CaptureFixture[str]


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and which paths were asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", paths
        finally:
            server.shutdown()
            thread.join()


def test_what_it_is_now(capsys: Capture) -> None:
    with answering(200, b'{"name": "p[/]0", "role": "decode", "more": 1}') as (url, paths):
        assert main(["role", "p[/]0", "decode", f"{url}/v1"]) == 0
        assert capsys.readouterr().out == "worker p[/]0 is for decode now\n"
        assert main(["role", "p\udcff", "decode", url, "--json"]) == 0
        assert '"more": 1' in capsys.readouterr().out
    assert paths == ["/admin/workers/p%5B%2F%5D0/role", "/admin/workers/p%FF/role"]


def test_why_not(capsys: Capture) -> None:
    for status, body, text in (
        (409, b'{"error": {"message": "worker d0 is the last one"}}', "worker d0 is the last one"),
        (502, b"<html>", "the server answers with status 502"),
        (200, b"{}", "is no worker's state"),
        (200, b"null", "is no worker's state"),
        (200, b"<html>", "is no worker's state"),
    ):
        with answering(status, body) as (url, _):
            assert main(["role", "d0", "prefill", url]) == 2
        assert text in capsys.readouterr().err


def test_nobody_is_there(capsys: Capture) -> None:
    for url in ("http://127.0.0.1:9", "http://", "http://a..b"):
        assert main(["role", "d0", "prefill", url]) == 2
        assert "does not answer: " in capsys.readouterr().err
    assert main(["role", "d0", "prefill", "http://[::1"]) == 2
    assert "is no http address" in capsys.readouterr().err
