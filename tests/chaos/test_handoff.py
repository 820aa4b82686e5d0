"""Prefill and decode in processes of their own, over shared memory: the same bytes, whatever dies
on the way.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from chaos.test_workers import Answer, answers, requests, tiny_config, undisturbed, wait_until
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.cluster.canary import ANSWER_TOKENS, PROMPT_TOKENS
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config, SchedulerConfig
from headrace.live.generate import GenerateRequest
from support.http_server import running_server

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = tiny_config(tmp_path_factory.mktemp("model"))
    cluster = ClusterConfig(
        prefill=1, decode=1, handoff="always", silence_timeout_s=1.0, restart_delay_s=0
    )
    # Steps are short, so that KV goes while the rest of a prompt is computed.
    return replace(config, cluster=cluster, scheduler=SchedulerConfig(step_tokens=16))


@pytest.fixture(scope="module")
def asked() -> list[GenerateRequest]:
    return requests(8)


@pytest.fixture(scope="module")
def wanted(config: Config, asked: list[GenerateRequest]) -> list[Answer]:
    return undisturbed(config, asked)


@pytest.fixture(scope="module")
def cluster(config: Config) -> Iterator[BootedCluster]:
    booted = boot_cluster(config)
    try:
        yield booted
    finally:
        booted.close()


def pid_of(cluster: BootedCluster, name: str) -> int | None:
    return {worker.name: worker.pid for worker in cluster.engine.workers()}[name]


def strike(cluster: BootedCluster, name: str, number: signal.Signals) -> None:
    pid = pid_of(cluster, name)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def all_up(cluster: BootedCluster) -> bool:
    return all(worker.is_ready for worker in cluster.engine.workers())


def settle(cluster: BootedCluster) -> None:
    """Everything is up, and holds nothing for anybody."""
    wait_until(lambda: all_up(cluster))
    wait_until(lambda: cluster.engine.stats().num_pinned_blocks == 0)
    cluster.engine.check()


def test_prompts_are_computed_by_one_and_decoded_by_the_other(
    cluster: BootedCluster, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    num_before = cluster.engine.stats().num_handoffs
    assert answers(cluster.text_engine, asked) == wanted
    assert cluster.engine.stats().num_handoffs - num_before == len(asked)
    settle(cluster)
    time.sleep(0.5)  # for the workers' last word on their state
    stats = {worker.name: worker.stats for worker in cluster.engine.workers()}
    prefill, decode = stats["p0"], stats["d0"]
    assert prefill is not None
    assert decode is not None
    num_prompt = sum(len(request.prompt_tokens) for request in asked)
    num_output = sum(request.params.max_tokens for request in asked)
    canary = PROMPT_TOKENS + ANSWER_TOKENS
    assert prefill.num_computed_tokens <= num_prompt + canary
    assert decode.num_computed_tokens <= num_output + 16 * len(asked) + canary
    assert decode.num_hit_tokens > num_prompt / 2
    for request in asked:
        decision = cluster.engine.decision(request.request_id)
        assert decision is not None
        assert decision.before is not None
        assert (decision.before.chosen.name, decision.chosen.name) == ("p0", "d0")
        assert decision.before.before is None


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_who_decodes_it_and_who_had_its_prompt(
    cluster: BootedCluster, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settle(cluster)
    caplog.set_level("INFO", logger="headrace.access")
    with running_server(cluster) as server:
        for max_tokens, worker in ((5, "d0"), (1, "p0")):
            for prompt in ("once", "once upon a time " * 3):  # of one step, and of several
                body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
                answer = httpx.post(f"{server.url}/v1/completions", json=body)
                headers = answer.headers
                assert headers["x-headrace-worker"] == worker
                assert headers["x-headrace-prefill-worker"] == "p0"
                url = f"{server.url}/admin/decisions/{headers['x-headrace-decision']}"
                decision = httpx.get(url).json()
                assert decision["worker"] == worker
                prompts = decision["before"] if worker == "d0" else decision
                assert (prompts["worker"], prompts["asks_for"]) == ("p0", "prefill")
                lines = [json.loads(one.message) for one in caplog.records]
                (line,) = [one for one in lines if one["id"] == headers["x-request-id"]]
                assert (line["worker"], line["prefill_worker"]) == (worker, "p0")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_either_may_die_when_all_have_begun(
    cluster: BootedCluster,
    asked: list[GenerateRequest],
    wanted: list[Answer],
    name: str,
    number: signal.Signals,
) -> None:
    settle(cluster)
    got = answers(cluster.text_engine, asked, strike=lambda: strike(cluster, name, number))
    assert got == wanted
    settle(cluster)
    assert answers(cluster.text_engine, asked[:2]) == wanted[:2]


@pytest.mark.parametrize(
    "delay_ms",
    [10, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0, 2, 5, 20, 40, 80))],
)
@pytest.mark.parametrize("name", ["p0", "d0"])
def test_and_at_any_moment(
    cluster: BootedCluster,
    asked: list[GenerateRequest],
    wanted: list[Answer],
    name: str,
    delay_ms: int,
) -> None:
    """Also while KV is on its way."""
    settle(cluster)

    def later() -> None:
        time.sleep(delay_ms / 1e3)
        strike(cluster, name, signal.SIGKILL)

    # Other salts: nothing of the prompts is cached anywhere.
    salted = [replace(request, salt=f"{name} {delay_ms}") for request in asked]
    thread = threading.Thread(target=later)
    thread.start()
    got = answers(cluster.text_engine, salted)
    thread.join()
    assert got == wanted
    settle(cluster)
    assert answers(cluster.text_engine, asked[:1]) == wanted[:1]


def test_without_prefill_workers_the_others_do_it_alone(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    lonely = replace(
        config,
        cluster=ClusterConfig(prefill=1, decode=1, handoff="always", restart_delay_s=3600),
    )
    asked = requests(3)
    wanted = undisturbed(config, asked)
    cluster = boot_cluster(lonely)
    try:
        for _ in range(2):  # the first life is followed by another one at once
            wait_until(lambda: all_up(cluster))
            strike(cluster, "p0", signal.SIGKILL)
            wait_until(lambda: not all_up(cluster))
        wait_for_loss: Callable[[], bool] = lambda: pid_of(cluster, "p0") is None  # noqa: E731
        wait_until(wait_for_loss)
        assert answers(cluster.text_engine, asked) == wanted
        cluster.engine.check()
        assert answers(cluster.text_engine, asked[:1]) == wanted[:1]
    finally:
        cluster.close()
