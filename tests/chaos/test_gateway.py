"""Engines that do all that engines should not: what clients of the gateway notice of it."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx
import pytest

from support import stub_engine as stub
from support.fake_engine import MODEL_NAME, formula_model
from support.gateway import RunningGateway, running_gateway
from support.http_server import running_server
from support.raw_http import eventually, request_bytes, rest_of, seen_until
from support.stub_engine import Behaviour, Stub, stub_engine

GOOD = stub.streams("good")
GOOD_BYTES = stub.event("good") + stub.DONE
PATH = "/v1/completions"


def ask(gateway: RunningGateway, **fields: Any) -> httpx.Response:
    body = {"model": stub.MODEL, "prompt": "hello", "stream": True, **fields}
    return httpx.post(gateway.url + PATH, json=body, timeout=20)


@contextmanager
def gateway_over(
    *behaviours: Behaviour, **settings: Any
) -> Iterator[tuple[RunningGateway, list[Stub]]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(stub_engine(behaviour)) for behaviour in behaviours]
        urls = [engine.url for engine in engines]
        yield stack.enter_context(running_gateway(*urls, **settings)), engines


@contextmanager
def bad_and_good(bad: Behaviour, **settings: Any) -> Iterator[tuple[RunningGateway, Stub, Stub]]:
    """Two engines, of which the bad one is asked first."""
    with (
        stub_engine(bad) as first,
        stub_engine(GOOD, health=503) as second,
        running_gateway(first.url, second.url, waits_for=1, **settings) as gateway,
    ):
        second.health = 200
        eventually(lambda: gateway.is_up("e1"))
        yield gateway, first, second


def last_event(content: bytes) -> Any:
    assert content.endswith(b"\n\n")
    return json.loads(content.rstrip().rsplit(b"\n\n", 1)[-1].removeprefix(b"data: "))


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


FAULTS: dict[str, Behaviour] = {
    "closes": lambda sock, asked: None,
    "closes in the head": stub.sends(b"HTTP/1.1 200 OK\r\ncontent-ty"),
    "closes before the body": stub.sends(stub.STREAM_HEAD),
    "says garbage": stub.sends(b"\x00\xff garbage \r\n\r\n"),
    "never ends its headers": stub.sends_headers_for_ever,
    "redirects": stub.says(307, b"", location="http://127.0.0.1:1/v1/completions"),
    "500": stub.says(500, b'{"error": "no"}'),
    "429": stub.says(429, b'{"error": "busy"}', retry_after="7"),
    "503": stub.says(503, b'{"error": "loading"}'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_before_the_first_byte_another_engine_is_asked(fault: str) -> None:
    with bad_and_good(FAULTS[fault]) as (gateway, bad, good):
        for _ in range(2):
            response = ask(gateway)
            assert (response.status_code, response.content) == (200, GOOD_BYTES)
            assert response.headers["x-headrace-worker"] == "e1"
        assert len(bad.asked) >= 1
        assert [one.body for one in good.asked] == [bad.asked[0].body] * 2


def test_an_engine_that_hangs_is_left_after_a_while() -> None:
    with bad_and_good(stub.hangs(), engine_first_byte_s=0.5) as (gateway, bad, _):
        response = ask(gateway)
        assert (response.status_code, response.content) == (200, GOOD_BYTES)
        assert (response.headers["x-headrace-worker"], len(bad.asked)) == ("e1", 1)
        eventually(lambda: bad.num_left == 1)  # and what it does is not waited for


def test_an_engine_that_does_not_even_say_how_it_is_loses_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.cluster.gateway.watch.LOOK_TIMEOUT_S", 0.1)
    with bad_and_good(stub.hangs(), silence_timeout_s=1) as (gateway, bad, _):
        bad.health = 0
        response = ask(gateway)
        assert (response.status_code, response.content) == (200, GOOD_BYTES)
        eventually(lambda: not gateway.is_up("e0"))
        bad.health, bad.behave = 200, GOOD
        bad.is_closing.set()
        eventually(lambda: gateway.is_up("e0"))


def test_a_stream_that_stalls_with_its_engine_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.cluster.gateway.watch.LOOK_TIMEOUT_S", 0.1)
    begun = stub.STREAM_HEAD + stub.chunk(stub.event("one"))
    with gateway_over(stub.hangs(begun), silence_timeout_s=1) as (gateway, (engine,)):
        engine.health = 0
        response = ask(gateway)
        assert response.status_code == 200
        assert last_event(response.content)["error"]["code"] == "engine_failed"
        engine.is_closing.set()


def test_an_engine_that_streams_is_not_silent_though_it_answers_no_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.cluster.gateway.watch.LOOK_TIMEOUT_S", 0.1)
    words = [str(number) for number in range(12)]
    with gateway_over(stub.streams(*words, pause_s=0.2), silence_timeout_s=1) as (gateway, one):
        body = {"model": stub.MODEL, "prompt": "hello", "stream": True}
        with httpx.stream("POST", gateway.url + PATH, json=body, timeout=20) as response:
            pieces = response.iter_bytes()
            seen = next(pieces)
            one[0].health = 0
            assert seen + b"".join(pieces) == b"".join(map(stub.event, words)) + stub.DONE
        # Then it is.
        eventually(lambda: not gateway.is_up("e0"))
        one[0].is_closing.set()


# ---- nobody else is there


def test_the_last_refusal_is_the_clients() -> None:
    busy = stub.says(429, b'{"error": "busy"}', retry_after="7")
    with gateway_over(busy, busy) as (gateway, engines):
        response = ask(gateway)
    assert (response.status_code, response.content) == (429, b'{"error": "busy"}')
    assert response.headers["retry-after"] == "7"
    assert [len(engine.asked) for engine in engines] == [1, 1]


def test_an_engine_that_asked_for_rest_gets_it() -> None:
    busy = stub.says(429, b"{}", retry_after="7")
    with bad_and_good(busy) as (gateway, bad, good):
        for _ in range(6):
            assert ask(gateway).status_code == 200
    assert (len(bad.asked), len(good.asked)) == (1, 6)


def test_retries_are_bounded() -> None:
    with gateway_over(*[FAULTS["closes"]] * 5, max_migrations=2) as (gateway, engines):
        response = ask(gateway)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert response.json()["error"]["code"] == "overloaded"
        assert sum(len(engine.asked) for engine in engines) == 3


def test_without_engines_the_answer_is_503() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with running_gateway(url, waits_for=0) as gateway:
        assert httpx.get(gateway.url + "/health").status_code == 200
        assert httpx.get(gateway.url + "/health").json() == {"status": "waiting"}
        eventually(lambda: gateway.gateway.engines[0].reason.startswith("cannot"))
        ready = httpx.get(gateway.url + "/ready")
        assert ready.status_code == 503
        assert ready.json() == {
            "status": "waiting",
            "engines": {"e0": "cannot connect: connection refused"},
            "detail": "no engine is up; requests wait for one, then they are refused",
        }
        response = ask(gateway)
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert response.json()["error"]["message"].startswith("no engine came up within")


def test_a_request_waits_for_an_only_engine_to_come_back() -> None:
    port = free_port()
    with running_gateway(f"http://127.0.0.1:{port}", waits_for=0, worker_wait_s=10) as gateway:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(ask(gateway)))
        asking.start()
        eventually(lambda: gateway.gateway.num_deliveries == 1)
        with stub_engine(GOOD, port=port):
            asking.join(10)
            assert answers[0].content == GOOD_BYTES


def test_the_time_limit_holds_over_all_engines() -> None:
    settings = {"request_timeout_s": 0.5, "engine_first_byte_s": 0.2}
    with gateway_over(*[stub.hangs()] * 3, **settings) as (gateway, _):
        began = time.monotonic()
        response = ask(gateway)
        assert time.monotonic() - began < 2
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


def test_the_time_limit_ends_a_stream() -> None:
    begun = stub.STREAM_HEAD + stub.chunk(stub.event("one"))
    with gateway_over(stub.hangs(begun), request_timeout_s=0.3) as (gateway, (engine,)):
        response = ask(gateway)
        assert last_event(response.content)["error"]["code"] == "deadline_exceeded"
        eventually(lambda: engine.num_left == 1)


# ---- clients that leave, or do not read


@pytest.mark.parametrize("begun", [b"", stub.STREAM_HEAD + stub.chunk(stub.event("one"))])
def test_a_client_that_leaves_ends_the_call_at_once(begun: bytes) -> None:
    with stub_engine(stub.hangs(begun)) as engine, running_gateway(engine.url) as gateway:
        body = json.dumps({"model": stub.MODEL, "prompt": "x", "stream": True}).encode()
        with closing(socket.create_connection(("127.0.0.1", gateway.port))) as sock:
            sock.sendall(request_bytes(PATH, body))
            if begun:
                seen_until(sock, b"one")
            eventually(lambda: len(engine.asked) == 1)
        eventually(lambda: engine.num_left == 1)


def test_a_client_that_waits_for_an_engine_may_leave() -> None:
    with running_gateway(f"http://127.0.0.1:{free_port()}", waits_for=0) as gateway:
        body = json.dumps({"prompt": "x"}).encode()
        with closing(socket.create_connection(("127.0.0.1", gateway.port))) as sock:
            sock.sendall(request_bytes(PATH, body))
            eventually(lambda: gateway.gateway.num_deliveries == 1)
        eventually(lambda: gateway.gateway.num_deliveries == 0)


def test_an_engine_is_held_back_by_a_slow_client() -> None:
    sent = 0

    def floods(sock: socket.socket, asked: stub.Asked) -> None:
        nonlocal sent
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        sock.sendall(stub.STREAM_HEAD)
        piece = stub.chunk(stub.event("x" * 60_000))
        for _ in range(1000):
            sock.sendall(piece)
            sent += len(piece)

    def stands_still() -> bool:
        before = sent
        time.sleep(0.3)
        return sent == before

    with stub_engine(floods) as engine, running_gateway(engine.url) as gateway:
        body = json.dumps({"model": stub.MODEL, "prompt": "x", "stream": True}).encode()
        with closing(socket.socket()) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            sock.connect(("127.0.0.1", gateway.port))
            sock.sendall(request_bytes(PATH, body))
            eventually(lambda: sent > 0)
            eventually(stands_still)
            assert sent < 30 << 20  # of 60 MB
        eventually(lambda: engine.num_left == 1)


@pytest.mark.parametrize(("drain_timeout_s", "num_stops"), [(0.2, 1), (60, 2)])
def test_a_drain_lets_streams_finish_and_ends_those_that_do_not(
    drain_timeout_s: float, num_stops: int
) -> None:
    begun = stub.STREAM_HEAD + stub.chunk(stub.event("one"))
    with stub_engine(stub.hangs(begun)) as engine:
        gateway = RunningGateway(engine.url, drain_timeout_s=drain_timeout_s)
        eventually(lambda: gateway.is_up("e0"))
        body = json.dumps({"model": stub.MODEL, "prompt": "x", "stream": True}).encode()
        with closing(socket.create_connection(("127.0.0.1", gateway.port))) as sock:
            sock.sendall(request_bytes(PATH, body))
            eventually(lambda: len(engine.asked) == 1 and gateway.gateway.num_deliveries == 1)
            time.sleep(0.05)
            for _ in range(num_stops - 1):
                gateway.server.stop()
            gateway.stop(is_busy=True)
            assert b"the gateway is shutting down" in rest_of(sock)


# ---- engines that die under load


def test_no_request_is_lost_with_an_engine_before_its_first_byte() -> None:
    """One of three engines goes away, connections and all, while requests come in."""
    num_requests = 120

    async def load(url: str, strike: threading.Event) -> list[tuple[int, bytes]]:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:

            async def one(number: int) -> tuple[int, bytes]:
                body = {
                    "model": MODEL_NAME,
                    "prompt": f"request {number}",
                    "max_tokens": 20,
                    "stream": True,
                }
                response = await client.post(url + PATH, json=body)
                if number == num_requests // 4:
                    strike.set()
                return response.status_code, response.content

            return await asyncio.gather(*(one(number) for number in range(num_requests)))

    with ExitStack() as stack:
        models = [stack.enter_context(formula_model()) for _ in range(3)]
        for model in models:
            model.executor.step_s = 0.002
        servers = [stack.enter_context(running_server(model)) for model in models]
        urls = [server.url for server in servers]
        gateway = stack.enter_context(running_gateway(*urls))
        strike = threading.Event()

        def kill() -> None:
            strike.wait(20)
            server = servers[0].server
            assert server.loop is not None
            server.loop.call_soon_threadsafe(server._server.abort_connections)
            servers[0].server.stop()
            servers[0].server.stop()  # at once

        killer = threading.Thread(target=kill)
        killer.start()
        answers = asyncio.run(load(gateway.url, strike))
        killer.join()
        assert {status for status, _ in answers} == {200}
        whole = [content for _, content in answers if content.endswith(stub.DONE)]
        broken = [content for _, content in answers if not content.endswith(stub.DONE)]
        assert len(whole) > num_requests * 0.6
        # Those that had a byte, at the one that died.
        assert all(last_event(content)["error"] for content in broken)
        eventually(lambda: not gateway.is_up("e0"))


def test_a_gateway_that_fails_itself_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(page: str) -> None:
        raise KeyError(page)

    with stub_engine(GOOD, page="x") as engine:
        monkeypatch.setattr("headrace.cluster.gateway.watch.load_of", fails)
        with running_gateway(engine.url, waits_for=0) as gateway:
            eventually(lambda: httpx.get(gateway.url + "/health").status_code == 503)
    assert "engines are not watched any more" in caplog.text
