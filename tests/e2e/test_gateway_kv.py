"""A gateway that goes by what engines publish of their caches."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.cluster.gateway.kv_blocks import prompt_names, prompt_root
from headrace.core.base.errors import ConfigError
from support import stub_engine as stub
from support.engine_client import figure_of
from support.fake_engine import TEMPLATE, byte_tokenizer
from support.gateway import RunningGateway, running_gateway
from support.kv_publisher import CLEARED, batch, kv_publisher, removed, stored
from support.raw_http import eventually
from support.stub_engine import stub_engine

TOKENS = [(i * i) % 200 for i in range(640)]
OTHERS = TOKENS[::-1]
DONE = stub.says(200, json.dumps({"choices": []}).encode(), content_type="application/json")


def ask(gateway: RunningGateway, **fields: Any) -> str:
    """Which engine was asked."""
    reply = httpx.post(f"{gateway.url}/v1/completions", json=fields, timeout=10)
    assert reply.status_code == 200
    return reply.headers["x-headrace-worker"]


def num_hits(gateway: RunningGateway, **fields: Any) -> list[int]:
    """Blocks of the prompt that each engine is taken to have, by the decision."""
    reply = httpx.post(f"{gateway.url}/v1/completions", json=fields, timeout=10)
    route = f"{gateway.url}/admin/decisions/{reply.headers['x-headrace-decision']}"
    found = httpx.get(route).json()["candidates"]
    return [one["num_hit_blocks"] for one in sorted(found, key=lambda one: str(one["name"]))]


def test_requests_go_where_their_blocks_are() -> None:
    hashes: list[int | bytes] = list(range(40))
    with (
        stub_engine(DONE) as one,
        stub_engine(DONE) as two,
        kv_publisher() as kv1,
        kv_publisher() as kv2,
        running_gateway(
            f"a={one.url},kv-events={kv1.events_url},kv-replay={kv1.replay_url}",
            f"b={two.url},kv-events={kv2.events_url},kv-replay={kv2.replay_url}",
            policy="kv",
        ) as gateway,
    ):
        kv1.await_subscriber()
        kv2.await_subscriber()
        # b has all of it, a half; nobody has been asked yet.
        kv1.publish(batch(stored(hashes[:20], TOKENS[:320])))
        kv2.publish(batch(stored(hashes, TOKENS)))
        eventually(lambda: figure_of(gateway.url, "headrace_router_indexed_blocks") == 5 + 10)
        assert num_hits(gateway, prompt=TOKENS) == [5, 10]
        assert {ask(gateway, prompt=TOKENS) for _ in range(6)} == {"b"}
        # What was sent there is not taken to be cached: the engine would say so.
        assert num_hits(gateway, prompt=OTHERS) == [0, 0]
        assert num_hits(gateway, prompt=OTHERS) == [0, 0]
        # b evicts from the end on; then a has more.
        kv2.publish(batch(removed(*hashes[:9:-1])))
        eventually(lambda: num_hits(gateway, prompt=TOKENS) == [5, 2])
        assert {ask(gateway, prompt=TOKENS) for _ in range(6)} == {"a"}
        kv1.publish(batch(CLEARED))
        eventually(lambda: num_hits(gateway, prompt=TOKENS) == [0, 2])
        assert figure_of(gateway.url, 'headrace_engine_kv_blocks{engine="b"}') == 10
        assert figure_of(gateway.url, 'headrace_engine_kv_batches_total{engine="a"}') == 2
        kv1.publish(b"no batch")
        unknown = 'headrace_engine_kv_unknown_events_total{engine="a"}'
        eventually(lambda: figure_of(gateway.url, unknown) == 1)


def test_what_an_engine_has_outlives_its_silence() -> None:
    with (
        stub_engine(DONE) as engine,
        kv_publisher() as publisher,
        running_gateway(f"a={engine.url},kv-events={publisher.events_url}", policy="kv") as gateway,
    ):
        publisher.await_subscriber()
        publisher.publish(batch(stored([1], TOKENS)))
        eventually(lambda: num_hits(gateway, prompt=TOKENS) == [10])
        engine.health = 503
        eventually(lambda: not gateway.is_up("a"))
        publisher.publish(batch(stored([2], OTHERS)))
        engine.health = 200
        eventually(lambda: gateway.is_up("a"))
        eventually(lambda: num_hits(gateway, prompt=OTHERS) == [10])
        assert num_hits(gateway, prompt=TOKENS) == [10]


def test_texts_are_found_by_their_tokens_and_others_as_ever(tmp_path: Path) -> None:
    byte_tokenizer()._library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    text = "round and round it goes " * 40
    pictures = [{"role": "user", "content": [{"type": "image_url", "image_url": "x" * 2000}]}]
    with (
        stub_engine(DONE) as engine,
        kv_publisher() as publisher,
        running_gateway(
            f"a={engine.url},kv-events={publisher.events_url}",
            policy="kv",
            engine_tokenizer=str(tmp_path),
        ) as gateway,
    ):
        publisher.await_subscriber()
        publisher.publish(batch(stored([1], list(text.encode()))))
        names = prompt_names(prompt_root(), list(text.encode()), 100)
        eventually(
            lambda: figure_of(gateway.url, "headrace_router_indexed_blocks") == len(names) == 15
        )
        assert num_hits(gateway, prompt=text) == [15]
        # What the feed says nothing about, the router remembers.
        route = f"{gateway.url}/v1/responses"
        bodies = {"input": "a text that no feed tells of " * 40}
        for _ in range(2):
            reply = httpx.post(route, json=bodies, timeout=10)
            decision = f"{gateway.url}/admin/decisions/{reply.headers['x-headrace-decision']}"
            (candidate,) = httpx.get(decision).json()["candidates"]
        assert candidate["num_hit_blocks"] == 4
        chat = {"messages": pictures}
        assert httpx.post(f"{gateway.url}/v1/chat/completions", json=chat).status_code == 200


def test_a_tokenizer_that_nobody_needs() -> None:
    with pytest.raises(ConfigError, match="no engine publishes KV events"):
        RunningGateway("http://127.0.0.1:1", engine_tokenizer="/nowhere")
