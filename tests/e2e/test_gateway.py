"""A gateway over real servers, used as its clients do."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headrace.cli.main import main
from headrace.core.config.settings import SETTINGS
from support import stub_engine as stub
from support.fake_engine import MODEL_NAME, formula_model
from support.gateway import RunningGateway, running_gateway
from support.http_server import RunningServer, running_server
from support.raw_http import eventually
from support.stub_engine import Stub, stub_engine

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RunningServer]]:
    with ExitStack() as stack:
        models = [stack.enter_context(formula_model()) for _ in range(2)]
        yield [stack.enter_context(running_server(model)) for model in models]


@pytest.fixture(scope="module")
def gateway(servers: list[RunningServer]) -> Iterator[RunningGateway]:
    with running_gateway(*(server.url for server in servers)) as running:
        yield running


@pytest.fixture
def engine() -> Iterator[Stub]:
    """One that says what it was asked."""

    def behave(sock: Any, asked: stub.Asked) -> None:
        sock.sendall(
            stub.answer(
                200,
                json.dumps({"path": asked.path, "headers": asked.headers}).encode(),
                content_type="application/json",
                keep_alive="timeout=5",
                x_of_engine="yes",
                server="stub/1",
            )
        )

    with stub_engine(behave) as running:
        yield running


# ---- the official client


def test_a_chat_is_what_the_engine_says(
    gateway: RunningGateway, servers: list[RunningServer]
) -> None:
    def chat(url: str) -> str:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(
                model=MODEL_NAME, messages=MESSAGES, max_tokens=20, seed=7
            )
            stream = client.chat.completions.create(
                model=MODEL_NAME, messages=MESSAGES, max_tokens=20, seed=7, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == whole.choices[0].message.content
            return text

    assert chat(gateway.url) == chat(servers[0].url)


def test_many_streams_at_once(gateway: RunningGateway) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.completions.create(
            model=MODEL_NAME, prompt=f"number {number}", max_tokens=30, stream=True
        )
        return len("".join([chunk.choices[0].text async for chunk in stream]))

    async def ask_all() -> list[int]:
        url = f"{gateway.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(50)))

    assert asyncio.run(ask_all()) == [30] * 50
    metrics = httpx.get(f"{gateway.url}/metrics").text
    for engine in ("e0", "e1"):
        assert f'headrace_engine_requests_in_flight{{engine="{engine}"}} 0.0' in metrics
        assert f'headrace_engine_up{{engine="{engine}"}} 1.0' in metrics


def test_a_client_that_stops_reading_a_stream_frees_the_engine(
    gateway: RunningGateway, servers: list[RunningServer]
) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        stream = client.completions.create(
            model=MODEL_NAME, prompt="long", max_tokens=1500, stream=True
        )
        next(iter(stream))
        stream.close()
    eventually(lambda: all(one.booted.engine.stats().num_running == 0 for one in servers))


def test_refusals_of_the_engine_are_its_own(gateway: RunningGateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL_NAME, prompt="x", temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="other", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=MODEL_NAME, input="x")


def test_bodies_that_no_engine_gets(gateway: RunningGateway) -> None:
    url = f"{gateway.url}/v1/completions"
    assert httpx.post(url, content=b"{", timeout=5).json()["error"]["code"] == "invalid_json"
    assert httpx.post(url, content=b"[]", timeout=5).status_code == 400
    assert httpx.post(url, content=b"[" * 5000, timeout=5).status_code == 400
    assert httpx.post(url, json={}, headers={"x-slo-ttft-ms": "soon"}).status_code == 400
    large = b" " * (gateway.config.server.max_body_bytes + 1)
    assert httpx.post(url, content=large, timeout=5).status_code == 413
    assert httpx.get(url).status_code == 405


# ---- what crosses


def test_bytes_and_headers_cross_as_they_are(engine: Stub) -> None:
    body = b'{ "model":"stub", "prompt": "\\u00e4", "unknown": [1, 2.50], "n" : 1 }'
    headers = {
        "content-type": "application/json; charset=utf-8",
        "authorization": "Bearer secret",
        "x-of-client": "yes",
        "x-hop": "1",
        "connection": "keep-alive, x-hop",
        "accept-encoding": "br",
        "x-request-id": "mine",
    }
    with running_gateway(engine.url) as gateway:
        response = httpx.post(f"{gateway.url}/v1/completions", content=body, headers=headers)
    (asked,) = engine.asked
    assert asked.body == body
    assert asked.headers["host"] == engine.url.removeprefix("http://")
    assert asked.headers["authorization"] == "Bearer secret"
    assert asked.headers["content-type"] == headers["content-type"]
    assert asked.headers["x-of-client"] == "yes"
    assert asked.headers["x-request-id"] == "mine"
    assert asked.headers["accept-encoding"] == "identity"
    assert "x-hop" not in asked.headers
    assert response.headers["x-of-engine"] == "yes"
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-headrace-worker"] == "e0"
    assert "keep-alive" not in response.headers
    assert "server" not in response.headers


@pytest.mark.parametrize("path", ["chat/completions", "completions", "embeddings", "responses"])
def test_routes_that_are_passed_on(engine: Stub, path: str) -> None:
    with running_gateway(f"here={engine.url}/v1/") as gateway:
        response = httpx.post(f"{gateway.url}/v1/{path}?to=elsewhere", json={"input": "x" * 300})
    assert response.json()["path"] == f"/v1/{path}"
    assert response.headers["x-headrace-worker"] == "here"


def test_a_large_body_crosses(engine: Stub) -> None:
    body = json.dumps({"prompt": "x" * (3 << 20)}).encode()
    with running_gateway(engine.url) as gateway:
        assert httpx.post(f"{gateway.url}/v1/completions", content=body).status_code == 200
    assert engine.asked[0].body == body


def test_an_engines_own_key_replaces_the_clients(engine: Stub, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the engines\n* other\ne0 engine-key\n")
    with running_gateway(engine.url, engine_keys=str(keys)) as gateway:
        url, headers = f"{gateway.url}/v1/completions", {"authorization": "Bearer mine"}
        answer = httpx.post(url, json={}, headers=headers).json()
    assert answer["headers"]["authorization"] == "Bearer engine-key"


# ---- choices


def test_models_of_all_engines_together() -> None:
    with (
        stub_engine(stub.streams("a"), models=("one", "both")) as first,
        stub_engine(stub.streams("b"), models=("two", "both")) as second,
        running_gateway(first.url, second.url) as gateway,
    ):
        listed = httpx.get(f"{gateway.url}/v1/models").json()["data"]
        assert [card["id"] for card in listed] == ["one", "both", "two"]
        assert httpx.get(f"{gateway.url}/v1/models/two").json()["id"] == "two"
        assert httpx.get(f"{gateway.url}/v1/models/three").status_code == 404
        for model, names in (("one", {"e0"}), ("two", {"e1"}), ("both", {"e0", "e1"})):
            body = {"model": model, "prompt": "x"}
            answers = [httpx.post(f"{gateway.url}/v1/completions", json=body) for _ in range(4)]
            assert {answer.headers["x-headrace-worker"] for answer in answers} == names
        second.health = 503
        eventually(lambda: not gateway.is_up("e1"))
        gone = httpx.post(f"{gateway.url}/v1/completions", json={"model": "two"})
        assert (gone.status_code, gone.headers["retry-after"]) == (503, "2")


def test_a_conversation_stays_where_its_prefix_is() -> None:
    with (
        stub_engine(stub.streams("a")) as first,
        stub_engine(stub.streams("b")) as second,
        running_gateway(first.url, second.url, policy="kv") as gateway,
    ):
        for seed in range(4):
            messages = [{"role": "system", "content": f"{seed} be brief " * 200}]
            names = set()
            for turn in range(4):
                messages.append({"role": "user", "content": f"turn {turn} " * 20})
                response = httpx.post(
                    f"{gateway.url}/v1/chat/completions",
                    json={"model": stub.MODEL, "messages": messages, "stream": True},
                )
                names.add(response.headers["x-headrace-worker"])
            assert len(names) == 1
            decision = httpx.get(
                f"{gateway.url}/admin/decisions/{response.headers['x-headrace-decision']}"
            ).json()
            assert decision["policy"] == "kv"
            assert decision["candidates"][0]["num_hit_blocks"] >= 10


@pytest.mark.parametrize("policy", SETTINGS["router.policy"].choices)
def test_every_policy_chooses(policy: str) -> None:
    with (
        stub_engine(stub.streams("a")) as first,
        stub_engine(stub.streams("b")) as second,
        running_gateway(first.url, second.url, policy=policy) as gateway,
    ):
        for number in range(3):
            body = {"model": stub.MODEL, "prompt": f"{number} " * 300, "stream": True}
            response = httpx.post(f"{gateway.url}/v1/completions", json=body)
            assert response.content.endswith(stub.DONE)
        decision = gateway.gateway.switch.router.decision(3)
        assert decision is not None
        assert decision.policy == policy


def test_a_session_stays_with_its_engine() -> None:
    with (
        stub_engine(stub.streams("a")) as first,
        stub_engine(stub.streams("b")) as second,
        running_gateway(first.url, second.url, policy="session") as gateway,
    ):
        names: dict[str, set[str]] = {}
        for number in range(24):
            session = f"s{number % 8}"
            given: dict[str, Any] = (
                {"headers": {"x-session-id": session}} if number < 8 else {"headers": {}}
            )
            body = {"prompt": f"{number}"} | ({} if number < 8 else {"user": session})
            response = httpx.post(f"{gateway.url}/v1/completions", json=body, **given)
            names.setdefault(session, set()).add(response.headers["x-headrace-worker"])
        assert all(len(one) == 1 for one in names.values())
        assert set.union(*names.values()) == {"e0", "e1"}


def test_an_engine_that_is_busy_by_its_own_word_is_spared() -> None:
    def page(running: int) -> str:
        return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n"

    with (
        stub_engine(stub.streams("a"), page=page(100)) as first,
        stub_engine(stub.streams("b"), page=page(0)) as second,
        running_gateway(first.url, second.url, policy="least_loaded") as gateway,
    ):

        def chosen() -> str:
            response = httpx.post(f"{gateway.url}/v1/completions", json={"prompt": "x"})
            name: str = response.headers["x-headrace-worker"]
            return name

        eventually(lambda: {chosen() for _ in range(4)} == {"e1"})
        first.page, second.page = page(0), page(100)
        eventually(lambda: {chosen() for _ in range(4)} == {"e0"})


def test_decisions_are_for_this_machine_alone(gateway: RunningGateway) -> None:
    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body)
    url = f"{gateway.url}/admin/decisions/{answer.headers['x-headrace-decision']}"
    assert httpx.get(url).json()["request_id"] == int(answer.headers["x-headrace-decision"])
    assert httpx.get(url, headers={"x-forwarded-for": "203.0.113.7"}).status_code == 404
    assert httpx.get(f"{gateway.url}/admin/decisions/999999").status_code == 404


# ---- the command


def test_serve_without_a_model(
    engine: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        eventually(lambda: callable(signal.getsignal(signal.SIGTERM)))
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        assert main(["serve", "--engine", f"a={engine.url}", "--port", "0", "--json"]) == 0
    finally:
        stopping.join()
    told = json.loads(capsys.readouterr().out)
    assert told["engines"] == {"a": engine.url}


def test_serve_with_a_model_and_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model.gguf", "--engine", "http://127.0.0.1:9"]) == 2
    assert "but not both" in capsys.readouterr().err


def test_engines_of_other_models_are_filtered_as_such() -> None:
    with (
        stub.stub_engine(stub.streams("a")) as one,
        stub.stub_engine(stub.streams("b"), models=("other",)) as two,
        running_gateway(one.url, two.url) as gateway,
    ):
        body = {"model": "other", "prompt": "x", "stream": True}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=body)
        assert answer.status_code == 200
        decision_id = answer.headers["x-headrace-decision"]
        decision = httpx.get(f"{gateway.url}/admin/decisions/{decision_id}").json()
        assert [(one["reason"], one["workers"]) for one in decision["filtered"]] == [
            ("other model", ["e0"])
        ]
