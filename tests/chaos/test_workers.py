"""Real worker processes, real signals: whatever dies, readers have what they would have had."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pytest

from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.base.request import FinishReason
from headrace.core.base.sampling import SamplingParams
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config, DeviceConfig, KvConfig, ModelConfig, RouterConfig
from headrace.live.boot import boot
from headrace.live.choice import ChoiceDelta
from headrace.live.generate import GenerateRequest, TextEngine
from support.http_server import running_server
from support.tiny_model import BLOCK_BYTES, VOCAB, write_tiny_model

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

MAX_TOKENS = 400
WAIT_S = 30.0


def tiny_config(folder: Path, **cluster: object) -> Config:
    return Config(
        model=ModelConfig(path=str(write_tiny_model(folder / "tiny.gguf"))),
        device=DeviceConfig(threads=1),
        kv=KvConfig(memory_bytes=1024 * BLOCK_BYTES),
        cluster=ClusterConfig(workers=2, restart_delay_s=0, **cluster),  # type: ignore[arg-type]
        router=RouterConfig(policy="round_robin", breaker_failures=1000),
    )


def requests(num: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=f"r{index}",
            prompt_tokens=[(7 * index + 3 * i) % VOCAB for i in range(20 + 3 * index)],
            params=SamplingParams(
                temperature=0.0 if index % 2 else 0.9,
                seed=index,
                frequency_penalty=0.3 if index % 3 == 0 else 0.0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                logprobs=1,
            ),
        )
        for index in range(num)
    ]


Answer = tuple[str, list[object], FinishReason]


def answer_of(deltas: list[ChoiceDelta]) -> Answer:
    assert deltas[-1].finish is not None
    assert not deltas[-1].finish.error
    return (
        "".join(delta.text for delta in deltas),
        [logprob for delta in deltas for logprob in delta.logprobs],
        deltas[-1].finish.reason,
    )


def answers(
    engine: TextEngine,
    asked: list[GenerateRequest],
    *,
    strike: Callable[[], None] | None = None,
    num_begun: int | None = None,
) -> list[Answer]:
    """All at once; `strike` is called when so many have begun to answer (None: each)."""
    deltas: dict[int, list[ChoiceDelta]] = {}
    for index, delta in engine.stream_all(asked, max_open=len(asked)):
        deltas.setdefault(index, []).append(delta)
        if strike is not None and len(deltas) == (num_begun or len(asked)):
            strike()
            strike = None
    return [answer_of(deltas[index]) for index in range(len(asked))]


def undisturbed(config: Config, asked: list[GenerateRequest]) -> list[Answer]:
    booted = boot(replace(config, cluster=ClusterConfig()))
    try:
        return answers(booted.text_engine, asked)
    finally:
        booted.close()


def wait_until(is_so: Callable[[], bool], *, within_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return tiny_config(tmp_path_factory.mktemp("model"), silence_timeout_s=1.0)


@pytest.fixture(scope="module")
def cluster(config: Config) -> Iterator[BootedCluster]:
    booted = boot_cluster(config)
    try:
        yield booted
    finally:
        booted.close()


def all_up(cluster: BootedCluster) -> bool:
    return all(worker.is_ready for worker in cluster.engine.workers())


def pids(cluster: BootedCluster) -> list[int]:
    return [worker.pid for worker in cluster.engine.workers() if worker.pid is not None]


def is_replaced(cluster: BootedCluster, pid: int) -> bool:
    return all_up(cluster) and pid not in pids(cluster)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_lost_worker_costs_nobody_a_token(
    config: Config, cluster: BootedCluster, number: signal.Signals
) -> None:
    asked = requests(8)
    wanted = undisturbed(config, asked)
    before = cluster.engine.stats().num_migrations
    for _ in range(3):  # on a busy machine the victim may have ended all of its own by then
        wait_until(lambda: all_up(cluster))
        victim = pids(cluster)[0]
        strike = partial(os.kill, victim, number)
        got = answers(cluster.text_engine, asked, strike=strike, num_begun=1)
        assert got == wanted
        wait_until(partial(is_replaced, cluster, victim))
        with pytest.raises(ProcessLookupError):
            os.kill(victim, 0)
        cluster.engine.check()
        if num_migrations := cluster.engine.stats().num_migrations - before:
            break
    assert 1 <= num_migrations <= 4
    after = answers(cluster.text_engine, asked[:2])
    assert after == wanted[:2]


def test_a_worker_ends_by_a_signal_that_its_parent_ignores(
    config: Config,
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    booted = boot_cluster(config)
    try:
        wait_until(lambda: all_up(booted))
        victim = pids(booted)[0]
        os.kill(victim, signal.SIGTERM)
        wait_until(partial(is_replaced, booted, victim))
    finally:
        booted.close()


def test_all_workers_die_and_requests_wait_for_the_next_ones(
    config: Config, cluster: BootedCluster
) -> None:
    asked = requests(4)
    wanted = undisturbed(config, asked)
    wait_until(lambda: all_up(cluster))

    def strike() -> None:
        for pid in pids(cluster):
            os.kill(pid, signal.SIGKILL)

    assert answers(cluster.text_engine, asked, strike=strike) == wanted
    wait_until(lambda: all_up(cluster))
    cluster.engine.check()
    assert answers(cluster.text_engine, asked[:1]) == wanted[:1]


def test_choices_of_one_request_move_together(cluster: BootedCluster, config: Config) -> None:
    asked = [replace(requests(1)[0], n=3)]
    booted = boot(replace(config, cluster=ClusterConfig()))
    try:
        wanted = list(booted.text_engine.stream_sync(asked[0]))
    finally:
        booted.close()
    wait_until(lambda: all_up(cluster))
    got = []
    for delta in cluster.text_engine.stream_sync(asked[0]):
        got.append(delta)
        if len(got) == 10:
            for pid in pids(cluster):
                os.kill(pid, signal.SIGKILL)
    for index in range(3):
        mine, theirs = ([d for d in deltas if d.index == index] for deltas in (got, wanted))
        assert answer_of(mine) == answer_of(theirs)


def test_what_may_become_a_stop_string_is_kept_where_a_worker_is_lost(
    cluster: BootedCluster, config: Config
) -> None:
    """Its first characters came from one worker, and its last ones come from another."""
    plain = requests(1)[0]
    ((text, _, _),) = undisturbed(config, [plain])
    stop = text[100:300]
    assert text.index(stop) == 100
    asked = [replace(plain, stop=(stop,))]
    wanted = undisturbed(config, asked)
    assert (wanted[0][0], wanted[0][2]) == (text[:100], FinishReason.STOP)
    wait_until(lambda: all_up(cluster))
    before = cluster.engine.stats().num_migrations
    is_struck = False
    got = []
    for delta in cluster.text_engine.stream_sync(asked[0]):
        got.append(delta)
        if not is_struck and len("".join(one.text for one in got)) >= 90:
            is_struck = True
            for pid in pids(cluster):
                os.kill(pid, signal.SIGKILL)
    assert answer_of(got) == wanted[0]
    assert cluster.engine.stats().num_migrations > before
    wait_until(lambda: all_up(cluster))
    cluster.engine.check()


def test_cancelled_requests_end_with_their_worker(cluster: BootedCluster) -> None:
    wait_until(lambda: all_up(cluster))
    streams = [cluster.text_engine.stream_sync(request) for request in requests(6)]
    for stream in streams:
        next(stream)
    victim = threading.Thread(target=os.kill, args=(pids(cluster)[1], signal.SIGKILL))
    victim.start()
    for stream in streams:
        stream.close()
    victim.join()
    wait_until(lambda: cluster.engine.stats().num_running == 0)
    cluster.engine.check()


def test_an_answer_says_which_worker_made_it_and_why(cluster: BootedCluster) -> None:
    wait_until(lambda: all_up(cluster))
    with running_server(cluster) as server:
        for stream in (False, True):
            body = {"prompt": "once upon", "max_tokens": 5, "stream": stream}
            response = httpx.post(f"{server.url}/v1/completions", json=body)
            name, decision_id = (
                response.headers[f"x-headrace-{key}"] for key in ("worker", "decision")
            )
            assert decision_id in response.text
            url = f"{server.url}/admin/decisions/{decision_id}"
            decision = httpx.get(url).json()
            assert decision["worker"] == decision["candidates"][0]["name"] == name
            assert (decision["num_candidates"], decision["asks_for"]) == (2, "mixed")
            assert "x-headrace-prefill-worker" not in response.headers
            # Whatever comes through a proxy is somebody else's.
            assert httpx.get(url, headers={"x-forwarded-for": "127.0.0.1"}).status_code == 404
        assert httpx.get(f"{server.url}/admin/decisions/none").status_code == 404


def test_without_migration_a_stream_ends_with_an_error_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = boot_cluster(tiny_config(tmp_path, max_migrations=0))
    try:
        with running_server(cluster) as server:
            body = {"prompt": "once", "max_tokens": MAX_TOKENS, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                for pid in pids(cluster):
                    os.kill(pid, signal.SIGKILL)
                struck = time.monotonic()
                rest = list(lines)
            assert time.monotonic() - struck < 1.0
            assert '"code":"engine_error"' in "".join(rest)
            wait_until(lambda: any('"event":"request"' in text for text in caplog.messages))
            (line,) = [text for text in caplog.messages if '"event":"request"' in text]
            assert response.headers["x-request-id"] in line
            assert "was lost: its process has ended, with signal 9" in line
            text = httpx.get(f"{server.url}/metrics").text
            assert 'headrace_finished_seqs_total{finished_reason="error"} 1.0' in text
            assert "headrace_migrations_total 0.0" in text
            wait_until(lambda: all_up(cluster))
            text = httpx.get(f"{server.url}/metrics").text
            assert 'headrace_worker_starts_total{worker="w0"} 2.0' in text
            del body["stream"]
            response = httpx.post(f"{server.url}/v1/completions", json=body)
            assert response.status_code == 200
            server.service.metrics.check()
            cluster.engine.check()
    finally:
        cluster.close()
