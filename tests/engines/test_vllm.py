"""A gateway over two vLLM servers with the default model, and their KV events: `make test-vllm`."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import zmq
import zmq.devices

from headrace.bench.server import free_port
from support.engine_client import chat_text, client_of, figure_of, shows_its_model
from support.engine_process import EngineProcess
from support.gateway import RunningGateway, running_gateway
from support.peers.environments import python_of
from support.peers.servers import PEERS, start_vllm, vllm_model
from support.raw_http import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "smollm2"
BLOCK_TOKENS = 64  # of the router's names
STORY = "This is a story about a mill on a river, and the people who lived there. " * 40


@dataclass(frozen=True)
class Vllm:
    process: EngineProcess
    events: str  # as an engine's address names them

    @property
    def url(self) -> str:
        return self.process.url

    def figure(self, name: str) -> float:
        return figure_of(self.url, f"vllm:{name}{{")


def relay(published: str, events: str) -> None:
    """Binds both, until the tests end: vLLM itself binds to all addresses or to none."""
    device = zmq.devices.ThreadProxy(zmq.XSUB, zmq.XPUB)  # type: ignore[no-untyped-call]
    device.bind_in(published)
    device.bind_out(events)
    device.start()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines") / "log"


@pytest.fixture(scope="module")
def engines(log: Path) -> Iterator[list[Vllm]]:
    if not python_of("vllm").exists():
        pytest.skip(f"there is no {python_of('vllm')}: `make test-vllm` makes it")
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            published, events, replay = (f"127.0.0.1:{free_port()}" for _ in range(3))
            relay(f"tcp://{published}", f"tcp://{events}")
            settings = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://{published}",
                "replay_endpoint": f"tcp://{replay}",
            }
            process = start_vllm(log, threads=1, model=MODEL, kv_events=settings, is_eager=True)
            stack.callback(process.kill)
            started.append(Vllm(process, f"kv-events=tcp://{events},kv-replay=tcp://{replay}"))
        for one in started:
            one.process.await_ready(PEERS["vllm"].start_timeout_s)
        yield started


def gateway_over(engines: list[Vllm], log: Path, **settings: Any) -> Any:
    addresses = [f"{name}={one.url},{one.events}" for name, one in zip("ab", engines, strict=True)]
    return running_gateway(
        *addresses,
        engine_tokenizer=str(vllm_model(log)),
        silence_timeout_s=120.0,
        worker_wait_s=120.0,
        **settings,
    )


@pytest.fixture(scope="module")
def gateway(engines: list[Vllm], log: Path) -> Iterator[RunningGateway]:
    with gateway_over(engines, log) as running:
        yield running


def ask(url: str, prompt: str, **fields: Any) -> httpx.Response:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0} | fields
    reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=120)
    assert reply.status_code == 200
    return reply


def hits_of(gateway: RunningGateway, reply: httpx.Response) -> dict[str, int]:
    """Blocks of the prompt that each engine was taken to have."""
    route = f"{gateway.url}/admin/decisions/{reply.headers['x-headrace-decision']}"
    found = httpx.get(route).json()["candidates"]
    return {one["name"]: one["num_hit_blocks"] for one in found}


def test_it_is_up_and_shows_its_model(gateway: RunningGateway) -> None:
    ready = httpx.get(f"{gateway.url}/ready")
    assert (ready.status_code, ready.json()["engines"]) == (200, {"a": "up", "b": "up"})
    shows_its_model(gateway.url, MODEL)


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_is_the_engines_own(
    gateway: RunningGateway, engines: list[Vllm], stream: bool
) -> None:
    question = "What is the capital of France?"
    direct = chat_text(engines[0].url, MODEL, question, stream=False)
    assert "Paris" in direct
    # In turn at both.
    assert {chat_text(gateway.url, MODEL, question, stream=stream) for _ in range(2)} == {direct}


def test_a_refusal_is_the_engines_own(gateway: RunningGateway) -> None:
    with client_of(gateway.url) as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=4)
    assert "4096" in str(caught.value)


def test_parameters_of_a_hand_off_go_through(gateway: RunningGateway) -> None:
    parameters = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = ask(gateway.url, "One, two,", kv_transfer_params=parameters).json()
    # An engine without a connector takes them and gives none.
    assert answer["kv_transfer_params"] is None


def test_requests_go_where_the_engine_says_that_their_blocks_are(
    engines: list[Vllm], log: Path
) -> None:
    with gateway_over(engines, log, policy="kv") as gateway:
        first = ask(gateway.url, STORY)
        name = first.headers["x-headrace-worker"]
        engine = engines["ab".index(name)]
        eventually(lambda: hits_of(gateway, ask(gateway.url, STORY, max_tokens=1))[name] > 0)
        before = engine.figure("prefix_cache_hits_total")
        longer = ask(gateway.url, STORY + "One day, a stranger came.")
        hits = hits_of(gateway, longer)
        assert longer.headers["x-headrace-worker"] == name
        assert sum(hits.values()) == hits[name]
        # As many tokens as the engine itself then found.
        assert engine.figure("prefix_cache_hits_total") - before == hits[name] * BLOCK_TOKENS
        blocks = f'headrace_engine_kv_blocks{{engine="{name}"}}'
        known = figure_of(gateway.url, blocks)
        assert known > 0
        assert figure_of(gateway.url, f'headrace_engine_kv_gaps_total{{engine="{name}"}}') == 0
    # One that comes late has all of it by the replay.
    with gateway_over(engines, log, policy="kv") as late:
        eventually(lambda: figure_of(late.url, blocks) == known, 30)
        assert hits_of(late, ask(late.url, STORY))[name] == hits[name]


def test_a_chat_is_found_by_its_tokens(engines: list[Vllm], log: Path) -> None:
    messages = [{"role": "user", "content": "Please sum this up: " + STORY}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 1}
    with gateway_over(engines, log, policy="kv") as gateway:

        def num_hits() -> int:
            reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=fields, timeout=120)
            return max(hits_of(gateway, reply).values())

        assert num_hits() == 0
        eventually(lambda: num_hits() > 4)


def test_work_that_others_gave_an_engine_counts(engines: list[Vllm], log: Path) -> None:
    fields = {"model": MODEL, "prompt": "One,", "max_tokens": 2000, "ignore_eos": True}
    with gateway_over(engines, log, policy="least_loaded") as gateway, ExitStack() as stack:
        for _ in range(3):  # straight to a
            stack.enter_context(
                httpx.stream(
                    "POST",
                    f"{engines[0].url}/v1/completions",
                    json=fields | {"stream": True},
                    timeout=120,
                )
            )
        eventually(lambda: engines[0].figure("num_requests_running") == 3, 30)
        eventually(
            lambda: (
                {ask(gateway.url, "Two,").headers["x-headrace-worker"] for _ in range(4)} == {"b"}
            ),
            30,
        )


def test_a_client_that_leaves_frees_the_engine(
    gateway: RunningGateway, engines: list[Vllm]
) -> None:
    extra = {"ignore_eos": True}
    with client_of(gateway.url) as client:
        for _ in engines:
            stream = client.completions.create(
                model=MODEL, prompt="One,", max_tokens=3000, stream=True, extra_body=extra
            )
            next(iter(stream))
            stream.close()
    for one in engines:
        eventually(lambda one=one: one.figure("num_requests_running") == 0, 30)  # type: ignore[misc]


def test_an_engine_that_dies_in_mid_stream(gateway: RunningGateway, engines: list[Vllm]) -> None:
    """The last one: an engine is gone."""
    fields = {"model": MODEL, "prompt": "One,", "max_tokens": 3000, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{gateway.url}/v1/completions", json=fields | {"stream": True}, timeout=120
    ) as reply:
        name = reply.headers["x-headrace-worker"]
        lines = reply.iter_lines()
        words = [json.loads(line[6:]) for _, line in zip(range(8), lines, strict=False) if line]
        assert all(word["choices"] for word in words)
        engines["ab".index(name)].process.kill()
        last = [line for line in lines if line.startswith("data: ")][-1]
    assert json.loads(last[6:])["error"]["code"] == "engine_failed"
    eventually(lambda: not gateway.is_up(name))
    other = "b" if name == "a" else "a"
    answers = [ask(gateway.url, "One, two,") for _ in range(3)]
    assert {one.headers["x-headrace-worker"] for one in answers} == {other}
    assert figure_of(gateway.url, "headrace_broken_answers_total") == 1
