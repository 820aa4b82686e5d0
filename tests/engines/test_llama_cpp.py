"""A gateway over llama-cpp-python's server with the default model: `make test-engines`."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.engine_client import chat_text, client_of, figure_of, shows_its_model
from support.gateway import RunningGateway, running_gateway
from support.llama_cpp_server import MODEL, LlamaCppServer, llama_cpp_server
from support.raw_http import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# While it computes, this engine answers nothing else: see docs/gateway.md.
SETTINGS: dict[str, Any] = {"silence_timeout_s": 120.0, "worker_wait_s": 120.0}
LONG = "Once upon a time, in a land far away, there was a river that "


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LlamaCppServer]]:
    log = tmp_path_factory.mktemp("engines") / "log"
    with ExitStack() as stack:
        yield [stack.enter_context(llama_cpp_server(log)) for _ in range(2)]


@pytest.fixture(scope="module")
def gateway(engines: list[LlamaCppServer]) -> Iterator[RunningGateway]:
    with running_gateway(*(one.url for one in engines), **SETTINGS) as running:
        yield running


def completion_text(url: str, prompt: str, *, stream: bool) -> str:
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    with client_of(url) as client:
        if not stream:
            whole = client.completions.create(**asked)
            return str(whole.choices[0].text)
        chunks = client.completions.create(**asked, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)


def worker_of(gateway: RunningGateway, prompt: str, path: str = "completions") -> str:
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    reply = httpx.post(f"{gateway.url}/v1/{path}", json=fields, timeout=120)
    assert reply.status_code == 200
    return reply.headers["x-headrace-worker"]


def test_it_is_up_and_shows_its_model(gateway: RunningGateway) -> None:
    ready = httpx.get(f"{gateway.url}/ready")
    assert (ready.status_code, ready.json()["engines"]) == (200, {"e0": "up", "e1": "up"})
    shows_its_model(gateway.url, MODEL)


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_is_the_engines_own(
    gateway: RunningGateway, engines: list[LlamaCppServer], stream: bool
) -> None:
    question = "What is the capital of France?"
    direct = chat_text(engines[0].url, MODEL, question, stream=False)
    assert "Paris" in direct
    # Twice, so that either engine has answered.
    assert {chat_text(gateway.url, MODEL, question, stream=stream) for _ in range(2)} == {direct}
    direct = completion_text(engines[1].url, LONG, stream=False)
    assert len(direct) > 20
    assert {completion_text(gateway.url, LONG, stream=stream) for _ in range(2)} == {direct}


def test_a_refusal_is_the_engines_own(gateway: RunningGateway) -> None:
    with client_of(gateway.url) as client, pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 4000, max_tokens=4)
    assert caught.value.status_code == 400
    assert "context" in str(caught.value)


def test_a_client_that_leaves_frees_the_engine(
    gateway: RunningGateway, engines: list[LlamaCppServer]
) -> None:
    with client_of(gateway.url) as client:
        for _ in engines:
            stream = client.completions.create(
                model=MODEL, prompt=LONG, max_tokens=1900, stream=True
            )
            next(iter(stream))
            stream.close()
    # It answers one at a time: a stream that ran on would keep it for a minute.
    with httpx.Client(timeout=20) as quick:
        for _ in engines:
            fields = {"model": MODEL, "prompt": "One, two,", "max_tokens": 2}
            assert quick.post(f"{gateway.url}/v1/completions", json=fields).status_code == 200


def test_a_conversation_stays_and_others_spread(engines: list[LlamaCppServer]) -> None:
    begin = "This is a story about a mill on a river, and the people who lived there. " * 8
    with running_gateway(*(one.url for one in engines), policy="kv", **SETTINGS) as gateway:
        first = worker_of(gateway, begin)
        assert {worker_of(gateway, begin + "And then " * n) for n in range(1, 5)} == {first}
        decision = httpx.get(f"{gateway.url}/admin/decisions/2").json()
        hits = {one["name"]: one["num_hit_blocks"] for one in decision["candidates"]}
        assert hits[first] > 0
        assert sum(hits.values()) == hits[first]
        assert {worker_of(gateway, f"{n} " * 40) for n in range(8)} == {"e0", "e1"}
        assert figure_of(gateway.url, "headrace_router_hit_blocks_total") > 0


def test_an_engine_that_dies_in_mid_stream(tmp_path: Path) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(llama_cpp_server(tmp_path / "log")) for _ in range(2)]
        urls = [f"{name}={one.url}" for name, one in zip("ab", engines, strict=True)]
        gateway = stack.enter_context(running_gateway(*urls, **SETTINGS))
        fields = {"model": MODEL, "prompt": LONG, "max_tokens": 1900, "stream": True}
        with httpx.stream(
            "POST", f"{gateway.url}/v1/completions", json=fields, timeout=120
        ) as reply:
            name = reply.headers["x-headrace-worker"]
            dying = engines["ab".index(name)]
            lines = reply.iter_lines()
            words = [json.loads(line[6:]) for _, line in zip(range(8), lines, strict=False) if line]
            assert all(word["choices"] for word in words)
            dying.kill()
            # What had been sent before may still come.
            last = [line for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last[6:])["error"]["code"] == "engine_failed"
        eventually(lambda: not gateway.is_up(name))
        other = "b" if name == "a" else "a"
        assert {worker_of(gateway, "One, two,") for _ in range(3)} == {other}
        assert figure_of(gateway.url, f'headrace_engine_up{{engine="{name}"}}') == 0
        assert figure_of(gateway.url, "headrace_broken_answers_total") == 1
        reasons = httpx.get(f"{gateway.url}/ready").json()["engines"]
        assert reasons[other] == "up"
        assert "refused" in reasons[name]
        # Somebody starts it again.
        port = int(dying.url.rsplit(":", 1)[1])
        stack.enter_context(llama_cpp_server(tmp_path / "log", port))
        eventually(lambda: gateway.is_up(name), 30)
        assert {worker_of(gateway, "One, two,") for _ in range(4)} == {"a", "b"}
