"""More than there is room for, over real workers: everybody is served in turn or told when to come
back, and everybody has the bytes that it would have had alone.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest

from chaos.test_workers import (
    Answer,
    all_up,
    answer_of,
    answers,
    pids,
    requests,
    tiny_config,
    undisturbed,
    wait_until,
)
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.base.events import Arrive, Emit, Finish, StartStep, StepDone
from headrace.core.base.metrics import percentile
from headrace.core.base.types import Ns
from headrace.core.config.schema import Config
from headrace.live.event_log import EventLogReader
from headrace.live.generate import GenerateRequest
from support import tiny_model
from support.http_server import running_server
from support.tiny_model import BLOCK_BYTES, VOCAB

if TYPE_CHECKING:
    from headrace.live.choice import ChoiceDelta

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return tiny_config(tmp_path)


@contextmanager
def audited(config: Config) -> Iterator[BootedCluster]:
    """A cluster which serves one more request in the end, and holds nothing for anybody."""
    asked = [with_params(one, max_tokens=40) for one in requests(1)]
    wanted = undisturbed(config, asked)
    cluster = boot_cluster(config)
    try:
        wait_until(lambda: all_up(cluster))
        yield cluster
        assert answers(cluster.text_engine, asked) == wanted
        wait_until(lambda: _num_held(cluster) == 0)
        cluster.engine.check()
    finally:
        cluster.close()


def _num_held(cluster: BootedCluster) -> int:
    stats = cluster.engine.stats()
    return stats.num_running + stats.num_waiting + stats.num_pinned_blocks


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def prompt(number: int, num_tokens: int) -> list[int]:
    return [(7 * number + 3 * i) % VOCAB for i in range(num_tokens)]


def with_params(request: GenerateRequest, **params: object) -> GenerateRequest:
    return replace(request, params=msgspec.structs.replace(request.params, **params))


# ---- L01

NUM_WAITING = 10_000
NUM_AT_ONCE = 32  # of a worker
BYTES_OF_ONE = 20_000  # that a request takes while it waits, its reader here included


@pytest.mark.slow
def test_ten_thousand_wait_in_order_and_the_next_one_is_told_when_to_come_back(
    config: Config,
) -> None:
    """They come while the workers stand still; every second one is of lower priority."""
    crowded = replace(
        config,
        cluster=replace(config.cluster, silence_timeout_s=600),
        router=replace(config.router, max_waiting_requests=NUM_WAITING, worker_queue_ms=1),
        scheduler=replace(config.scheduler, max_running_seqs=NUM_AT_ONCE),
    )
    kinds = [with_params(one, max_tokens=3) for one in requests(20)]
    wanted = undisturbed(config, kinds)
    asked = [replace(kinds[i % 20], priority=100 * (i % 2)) for i in range(NUM_WAITING)]
    with audited(crowded) as cluster, running_server(cluster) as server:
        readers = Readers(cluster, asked)
        for pid in pids(cluster):
            os.kill(pid, signal.SIGSTOP)
        before = memory_bytes(os.getpid())
        readers.start()
        wait_until(lambda: num_waiting_settled(cluster) > NUM_WAITING - 4 * NUM_AT_ONCE)
        assert memory_bytes(os.getpid()) - before < BYTES_OF_ONE * NUM_WAITING
        # Those that are on their way to workers have left room for as many others.
        num_more = NUM_WAITING - num_waiting_settled(cluster)
        with ThreadPoolExecutor(num_more + 3) as pool:
            url = f"{server.url}/v1/completions"
            body = {"prompt": "once", "max_tokens": 3, "priority": 1000}
            posts = [
                pool.submit(httpx.post, url, json=body, timeout=100) for _ in range(num_more + 3)
            ]
            wait_until(lambda: sum(post.done() for post in posts) == 3)
            for pid in pids(cluster):
                os.kill(pid, signal.SIGCONT)
        replies = [post.result() for post in posts]
        assert sorted(reply.status_code for reply in replies) == [*[200] * num_more, *[429] * 3]
        refused = [reply for reply in replies if reply.status_code == 429]
        assert min(int(reply.headers["retry-after"]) for reply in refused) >= 1
        readers.join()
        assert readers.answers() == [wanted[i % 20] for i in range(NUM_WAITING)]
        check_order(readers.began)
        assert cluster.engine.stats().num_migrations == 0


def num_waiting_settled(cluster: BootedCluster) -> int:
    """How many wait, when no more come."""
    num, before = cluster.engine.stats().num_waiting, -1
    while num != before:
        time.sleep(0.5)
        num, before = cluster.engine.stats().num_waiting, num
    return num


class Readers(threading.Thread):
    """One thread that reads for all."""

    def __init__(self, cluster: BootedCluster, asked: list[GenerateRequest]) -> None:
        super().__init__()
        self.began: list[int] = []  # in the order of their first words
        self._cluster, self._asked = cluster, asked
        self._deltas: dict[int, list[ChoiceDelta]] = {}

    def run(self) -> None:
        num = len(self._asked)
        for index, delta in self._cluster.text_engine.stream_all(self._asked, max_open=num):
            if index not in self._deltas:
                self._deltas[index] = []
                self.began.append(index)
            self._deltas[index].append(delta)

    def answers(self) -> list[Answer]:
        return [answer_of(self._deltas[index]) for index in range(len(self._asked))]


def check_order(began: list[int]) -> None:
    """First come, first served, but for those that two workers have at once; and low priorities
    after high ones, but for those that workers had before all had come.
    """
    at_once = 2 * 2 * NUM_AT_ONCE
    for is_low in (False, True):
        like = [index for index in began if index % 2 == is_low]
        assert max(abs(place - index // 2) for place, index in enumerate(like)) < at_once
    last_high = max(place for place, index in enumerate(began) if index % 2 == 0)
    assert last_high - len(began) // 2 < at_once


# ---- L02


@pytest.mark.parametrize(
    "admission", ["optimistic", pytest.param("predicted", marks=pytest.mark.slow)]
)
def test_fifty_in_pools_for_three_all_end(config: Config, admission: str) -> None:
    num_prompt, num_output = 40, 100
    num_tokens = num_prompt + num_output
    asked = [
        with_params(replace(one, prompt_tokens=prompt(i, num_prompt)), max_tokens=num_output)
        for i, one in enumerate(requests(50))
    ]
    wanted = undisturbed(config, asked)
    small = replace(
        config,
        model=replace(config.model, max_model_len=num_tokens),
        kv=replace(config.kv, memory_bytes=3 * -(-num_tokens // 16) * BLOCK_BYTES),
        scheduler=replace(config.scheduler, admission=admission, predicted_output_tokens=16),
    )
    with audited(small) as cluster:
        ends: list[Finish] = []
        cluster.engine.observe(
            lambda now, event, effects: ends.extend(e for e in effects if isinstance(e, Finish))
        )
        assert answers(cluster.text_engine, asked) == wanted
        assert len(ends) == len(asked)
        num_preemptions = [end.num_preemptions for end in ends]
        assert max(num_preemptions) <= small.scheduler.max_preemptions
        assert sum(num_preemptions) > 0
        wait_until(lambda: _num_held(cluster) == 0)
        tax = cluster.engine.stats().num_recomputed_tokens
        assert tax < 0.5 * len(asked) * num_tokens


# ---- L03


@pytest.mark.slow
def test_short_ones_are_served_while_a_long_prompt_advances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker; twenty short ones come again and again, until the long one has its first token.

    Their waits are counted in tokens, as a shared machine's clock would measure its neighbours. By
    themselves, the last of twenty waits for all that they have to compute. Beside the long one, p99
    is less than twice that.
    """
    monkeypatch.setattr(tiny_model, "CONTEXT", 1 << 13)
    config = tiny_config(tmp_path)
    num_long = 8_000
    config = replace(
        config,
        cluster=replace(config.cluster, workers=0, decode=1),
        kv=replace(config.kv, memory_bytes=4 * num_long // 16 * BLOCK_BYTES),
        scheduler=replace(config.scheduler, step_tokens=64, budget="fixed"),
        telemetry=replace(config.telemetry, event_log=str(tmp_path / "long.events")),
    )
    short = [with_params(one, max_tokens=4) for one in requests(20)]
    long = with_params(replace(requests(1)[0], prompt_tokens=prompt(0, num_long)), max_tokens=4)
    wanted = undisturbed(config, [*short, long])
    with audited(config) as cluster:
        reader = Readers(cluster, [long])
        reader.start()
        num_rounds = 0
        while not reader.began:
            # Of one salt, later rounds would find what the first one has computed.
            salted = [replace(one, salt=str(num_rounds)) for one in short]
            assert answers(cluster.text_engine, salted) == wanted[:-1]
            num_rounds += 1
        reader.join()
        assert reader.answers() == [wanted[-1]]
    waits = waits_beside(tmp_path / "long.events.d0.1", num_long)
    assert len(waits) >= 20  # as many as there was time for
    num_of_a_round = sum(len(one.prompt_tokens) for one in short)
    assert percentile(sorted(waits), 0.99) < 2 * num_of_a_round


def waits_beside(log: Path, num_long: int) -> list[int]:
    """How many tokens the worker computed between the arrival of each that came while the prompt of
    so many tokens was computed, and its first token.
    """
    num_computed, long_id = 0, None
    running: dict[int, int] = {}
    came: dict[int, int] = {}
    waits: dict[int, int] = {}
    with EventLogReader(log) as frames:
        for frame in frames:
            match frame.event:
                case StepDone(result):
                    num_computed += running.pop(result.step_id)
                case Arrive((spec,)) if len(spec.prompt_tokens) == num_long:
                    long_id = spec.seq_id
                case Arrive((spec,)) if long_id is not None and long_id not in waits:
                    came[spec.seq_id] = num_computed
                case _:
                    pass
            for effect in frame.effects:
                match effect:
                    case StartStep(plan):
                        running[plan.step_id] = plan.num_tokens
                    case Emit(seq_id) if seq_id == long_id or seq_id in came:
                        waits.setdefault(seq_id, num_computed - came.get(seq_id, 0))
                    case _:
                        pass
    return [num for seq_id, num in waits.items() if seq_id != long_id]


# ---- L04


def test_what_can_never_fit_is_refused_at_once_and_is_in_nobodys_way(config: Config) -> None:
    """Others run, and more wait than there is room for."""
    asked = [
        with_params(replace(one, prompt_tokens=prompt(i, 40)), max_tokens=100)
        for i, one in enumerate(requests(120))
    ]
    wanted = undisturbed(config, asked)
    num_blocks = tiny_model.CONTEXT // 16  # of which one takes nine
    small = replace(config, kv=replace(config.kv, memory_bytes=num_blocks * BLOCK_BYTES))
    with audited(small) as cluster, running_server(cluster) as server:
        replies: list[httpx.Response] = []

        def ask_too_much() -> None:
            # Workers tell how many run four times a second.
            wait_until(lambda: cluster.engine.stats().num_running > 0)
            body = {"prompt": "x" * tiny_model.CONTEXT, "max_tokens": 1}
            replies.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))
            assert cluster.engine.stats().num_running > 0

        assert answers(cluster.text_engine, asked, strike=ask_too_much, num_begun=1) == wanted
        (reply,) = replies
        assert reply.status_code == 400
        assert "retry-after" not in reply.headers
        assert reply.json()["error"]["code"] == "context_length_exceeded"


# ---- L05


@pytest.mark.parametrize("policy", ["kv", pytest.param("prefix", marks=pytest.mark.slow)])
def test_twins_that_come_at_once_are_computed_once(config: Config, policy: str) -> None:
    """By each worker that the policy sends them to: `kv` may find two sooner than one."""
    num_twins, num_prompt, num_output = 6, 200, 8
    asked = [
        with_params(replace(one, prompt_tokens=prompt(1, num_prompt)), max_tokens=num_output)
        for one in requests(num_twins)
    ]
    wanted = undisturbed(config, asked)
    config = replace(config, router=replace(config.router, policy=policy))
    # Its tokens would be counted too.
    config = replace(config, cluster=replace(config.cluster, canary=False))
    with audited(config) as cluster:
        before = cluster.engine.stats().num_computed_tokens
        assert answers(cluster.text_engine, asked) == wanted
        num_first = 1 if policy == "prefix" else len(cluster.engine.workers())
        num_found = (num_twins - num_first) * 192
        wait_until(lambda: cluster.engine.stats().num_hit_tokens >= num_found)
        wait_until(lambda: _num_held(cluster) == 0)
        num_computed = cluster.engine.stats().num_computed_tokens - before
        assert num_computed <= num_first * num_prompt + num_twins * (16 + num_output)


# ---- L06

NUM_URGENT = 16


@pytest.mark.slow
def test_a_low_priority_is_served_however_many_high_ones_come(config: Config) -> None:
    """One worker that runs one at a time, for which many others always wait."""
    one_by_one = replace(
        config,
        cluster=replace(config.cluster, workers=0, decode=1),
        scheduler=replace(config.scheduler, order="priority", max_running_seqs=1),
    )
    asked = [with_params(one, max_tokens=60) for one in requests(NUM_URGENT)]
    wanted = undisturbed(config, asked)
    with audited(one_by_one) as cluster:
        low_has_ended = threading.Event()
        served = [0] * NUM_URGENT

        def ask_now(kind: int, priority: int) -> None:
            one = replace(asked[kind], priority=priority, arrived_ns=Ns(time.monotonic_ns()))
            assert answers(cluster.text_engine, [one]) == [wanted[kind]]

        def always(kind: int) -> None:
            while not low_has_ended.is_set():
                ask_now(kind, priority=0)
                served[kind] += 1

        with ThreadPoolExecutor(NUM_URGENT) as pool:
            urgent = [pool.submit(always, kind) for kind in range(NUM_URGENT)]
            try:
                wait_until(lambda: min(served) > 0)
                num_before = sum(served)
                ask_now(0, priority=1)
                num_meanwhile = sum(served) - num_before
            finally:
                low_has_ended.set()
            for one in urgent:
                one.result()
        assert num_meanwhile > 2 * NUM_URGENT  # they did go first
