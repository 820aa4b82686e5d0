"""No room, no time, no engine: what the client is told, and that the rest goes on."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from headrace.core.config.schema import SchedulerConfig
from headrace.core.engine.core import EngineCore
from headrace.models.text.literal import LiteralText
from headrace.models.text.tokenizer import Tokenizer
from headrace.server.exchange import PROBES
from support.fake_engine import FakeBooted, formula_model
from support.http_server import RunningServer, running_server
from support.raw_http import CHAT, post

COMPLETIONS = "/v1/completions"
ENDLESS = "long " * 20_000


@pytest.fixture
def booted() -> Iterator[FakeBooted]:
    scheduler = SchedulerConfig(max_running_seqs=1, max_waiting_seqs=1)
    with formula_model(scheduler=scheduler) as booted:
        yield booted


def ask(server: RunningServer, connection: HTTPConnection, **fields: Any) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 3} | fields)
    connection.request("POST", "/v1/completions", body)


def answer(connection: HTTPConnection) -> tuple[HTTPResponse, Any]:
    response = connection.getresponse()
    text = response.read()
    return response, json.loads(text) if text.startswith(b"{") else text.decode()


def connect(server: RunningServer) -> HTTPConnection:
    return HTTPConnection("127.0.0.1", server.port, timeout=20)


def test_a_full_queue_says_when_to_come_back(booted: FakeBooted) -> None:
    with running_server(booted) as server, ExitStack() as stack:
        connections = [stack.enter_context(closing(connect(server))) for _ in range(6)]
        booted.executor.gate.clear()
        for connection in connections[:2]:
            ask(server, connection)
            while booted.engine.stats().num_running == 0:
                time.sleep(0.001)
        while booted.engine.stats().num_waiting == 0:
            time.sleep(0.001)
        for connection in connections[2:]:
            ask(server, connection, stream=True)
            response, error = answer(connection)
            assert response.status == 429
            assert int(response.headers["retry-after"]) >= 1
            assert error["error"]["code"] == "rate_limit_exceeded"
        booted.executor.gate.set()
        for connection in connections[:2]:
            assert answer(connection)[0].status == 200
        ask(server, connections[5])
        assert answer(connections[5])[0].status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long(booted: FakeBooted, stream: bool) -> None:
    with (
        running_server(booted, request_timeout_s=0.2) as server,
        closing(connect(server)) as first,
        closing(connect(server)) as second,
    ):
        booted.executor.gate.clear()
        ask(server, first)
        while booted.engine.stats().num_running == 0:
            time.sleep(0.001)
        ask(server, second, stream=stream)
        response, error = answer(second)
        assert response.status == 504
        assert error["error"]["code"] == "deadline_exceeded"
        assert error["error"]["type"] == "timeout_error"
        booted.executor.gate.set()
        answer(first)


def test_a_stream_that_takes_too_long_ends_with_an_error(booted: FakeBooted) -> None:
    booted.executor.step_s = 0.01
    with (
        running_server(booted, request_timeout_s=0.3) as server,
        closing(connect(server)) as client,
    ):
        ask(server, client, stream=True, max_tokens=1000)
        response, text = answer(client)
        events = text.split("\n\n")[:-1]
        assert response.status == 200
        error = json.loads(events[-1].removeprefix("data: "))
        assert error["error"]["code"] == "deadline_exceeded"
        assert len(events) > 3
        assert "[DONE]" not in text
        # The connection is as good as before.
        ask(server, client)
        assert answer(client)[0].status == 200


def test_a_failed_engine_is_told_and_shown(
    booted: FakeBooted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(*args: Any) -> Any:
        raise RuntimeError("secret detail")

    caplog.set_level("INFO", logger="headrace.access")
    with running_server(booted) as server, closing(connect(server)) as client:
        booted.executor.gate.clear()
        ask(server, client, max_tokens=5)
        while booted.engine.stats().num_running == 0:
            time.sleep(0.001)
        monkeypatch.setattr(EngineCore, "handle", break_down)
        booted.executor.gate.set()
        response, error = answer(client)
        assert response.status == 500
        assert error["error"]["code"] == "engine_error"
        assert "secret" not in json.dumps(error)
        for path, status in (("/health", 503), ("/ready", 503)):
            client.request("GET", path)
            response, state = answer(client)
            assert (response.status, state) == (status, {"status": "failed"})
        until(lambda: sum(line["path"] in PROBES for line in lines(caplog)) == 2)
        # A probe that is told the truth is no fault of its own.
        probes = [
            r for r in caplog.records if '"path":"/health"' in r.message or "/ready" in r.message
        ]
        assert {r.levelname for r in probes if r.name == "headrace.access"} == {"INFO"}
        ask(server, client)
        response, error = answer(client)
        assert response.status == 503
        assert "restart" in error["error"]["message"]


def test_the_loop_stays_free_while_a_long_prompt_is_made(
    booted: FakeBooted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only tokenising tells that megabytes are too long, others are served meanwhile."""
    monkeypatch.setattr(Tokenizer, "least_tokens", lambda self, text: 0)
    with (
        running_server(booted) as server,
        closing(connect(server)) as large,
        closing(connect(server)) as small,
    ):
        start = time.monotonic()
        ask(server, large, prompt="long " * 200_000)
        longest = 0.0
        for _ in range(10):
            begin = time.monotonic()
            small.request("GET", "/ready")
            assert answer(small)[0].status == 200
            longest = max(longest, time.monotonic() - begin)
        response, error = answer(large)
        assert response.status == 400
        assert error["error"]["code"] == "context_length_exceeded"
        assert longest < (time.monotonic() - start) / 2


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": ENDLESS}, "prompt"),
        (COMPLETIONS, {"prompt": ENDLESS, "echo": True, "logprobs": 0}, "prompt"),
        (COMPLETIONS, {"prompt": ["short", ENDLESS]}, "prompt"),
        (COMPLETIONS, {"prompt": [[97] * 2048, [97]]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": ENDLESS}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": f"<|im_end|>{ENDLESS}"}]}, "messages"),
    ],
    ids=["text", "echo", "list", "tokens", "chat", "hidden"],
)
def test_what_is_far_too_long_is_not_tokenised(
    booted: FakeBooted,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    param: str,
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(LiteralText, "encode", encode)
    monkeypatch.setattr(Tokenizer, "decode", encode)
    with running_server(booted) as server:
        reply = post(server, fields, path)
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", param)
    assert "2047" in reply.error["message"]


def test_a_bug_is_no_traceback(booted: FakeBooted, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("secret detail")

    with running_server(booted) as server, closing(connect(server)) as client:
        with monkeypatch.context() as patched:
            patched.setattr(booted.text_engine, "stream", bug)
            ask(server, client)
            response, error = answer(client)
        assert response.status == 500
        assert error["error"]["code"] == "internal_error"
        assert "secret" not in json.dumps(error)
        ask(server, client)
        assert answer(client)[0].status == 200


def lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [json.loads(r.message) for r in caplog.records if r.name == "headrace.access"]


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_one_line_is_logged_for_each_request(
    booted: FakeBooted, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO", logger="headrace.access"),
        running_server(booted) as server,
        closing(connect(server)) as client,
    ):
        ask(server, client, zeta=1)
        answer(client)
        until(lambda: len(lines(caplog)) == 1)  # a line may come after its answer
        client.request("GET", "/nowhere")
        answer(client)
        until(lambda: len(lines(caplog)) == 2)
        with closing(socket.create_connection(("127.0.0.1", server.port))) as leaver:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"
            leaver.sendall(head.encode())
            until(lambda: b"in_flight 1.0" in server.service.metrics.render())
        until(lambda: len(lines(caplog)) == 3)
    logged = lines(caplog)
    assert [line["status"] for line in logged] == [200, 404, 499]
    assert logged[0]["completion_tokens"] == 3
    assert logged[0]["ignored_fields"] == ["zeta"]
    assert logged[0]["finish"] == ["length"]
    assert len({line["id"] for line in logged}) == 3
