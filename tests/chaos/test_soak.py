"""Mixed load on two prefill and two decode workers, of which one is killed or stopped every ten
seconds: nothing is lost, and no byte differs.

    make test-slow ARGS="tests/chaos/test_soak.py"          one minute
    SOAK_MINUTES=30 make test-slow ARGS=...        as long as that
"""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from chaos.test_workers import Answer, answer_of, tiny_config, wait_until
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.base.sampling import SamplingParams
from headrace.core.config.cluster import ClusterConfig
from headrace.live.boot import boot
from headrace.live.generate import GenerateRequest
from support.tiny_model import VOCAB

pytest.importorskip("headrace.ops.native._native")

MINUTES = float(os.environ.get("SOAK_MINUTES", "1"))
STRIKE_EVERY_S = 10.0
NUM_CLIENTS = 6
NUM_KINDS = 60  # different requests, asked again and again

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * MINUTES + 300)]


def kinds() -> list[GenerateRequest]:
    """Short and long prompts that share beginnings; greedy, seeded, penalised; several choices."""
    rng = Random(1)
    stem = [rng.randrange(VOCAB) for _ in range(200)]
    return [
        GenerateRequest(
            request_id=f"r{index}",
            prompt_tokens=stem[: rng.choice((0, 40, 120, 200))]
            + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))],
            params=SamplingParams(
                temperature=0.0 if index % 2 else 0.9,
                seed=index,
                frequency_penalty=0.3 if index % 3 == 0 else 0.0,
                max_tokens=rng.randrange(1, 250),
                ignore_eos=True,
                logprobs=1 if index % 4 == 0 else None,
                prompt_logprobs=0 if index % 7 == 0 else None,
            ),
            n=3 if index % 10 == 0 else 1,
        )
        for index in range(NUM_KINDS)
    ]


def ask(booted: object, request: GenerateRequest) -> list[Answer]:
    deltas = list(booted.text_engine.stream_sync(request))  # type: ignore[attr-defined]
    return [answer_of([d for d in deltas if d.index == index]) for index in range(request.n)]


class Client(threading.Thread):
    """Asks one request after another, and compares."""

    def __init__(
        self, cluster: BootedCluster, wanted: list[list[Answer]], seed: int, until_s: float
    ) -> None:
        super().__init__()
        self.num_answers = 0
        self.differing: list[int] = []
        self.error: BaseException | None = None
        self._cluster, self._wanted = cluster, wanted
        self._rng, self._until_s = Random(seed), until_s

    def run(self) -> None:
        asked = kinds()
        try:
            while time.monotonic() < self._until_s:
                kind = self._rng.randrange(NUM_KINDS)
                # A salt of its own now and then: nothing of it is cached.
                salt = str(self._rng.random()) if self._rng.random() < 0.3 else ""
                got = ask(self._cluster, replace(asked[kind], salt=salt))
                self.num_answers += 1
                if got != self._wanted[kind]:
                    self.differing.append(kind)
                time.sleep(self._rng.random() * 0.05)
        except BaseException as error:
            self.error = error


def test_nothing_is_lost_whatever_dies(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    alone = boot(replace(config, cluster=ClusterConfig()))
    wanted = [ask(alone, request) for request in kinds()]
    alone.close()

    cluster = boot_cluster(
        replace(
            config,
            cluster=ClusterConfig(
                prefill=2, decode=2, handoff="always", silence_timeout_s=2.0, restart_delay_s=0.1
            ),
        )
    )
    try:
        until_s = time.monotonic() + 60 * MINUTES
        clients = [Client(cluster, wanted, seed, until_s) for seed in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        num_strikes = strike_until(cluster, until_s, Random(7))
        for client in clients:
            client.join()
        wait_until(lambda: all(worker.is_ready for worker in cluster.engine.workers()))
        wait_until(lambda: cluster.engine.stats().num_pinned_blocks == 0)
        cluster.engine.check()
        assert ask(cluster, kinds()[0]) == wanted[0]
        stats = cluster.engine.stats()
        print(
            f"{sum(client.num_answers for client in clients)} requests, {num_strikes} strikes,"
            f" {stats.num_migrations} migrations"
        )
        assert [client.error for client in clients] == [None] * NUM_CLIENTS
        assert [client.differing for client in clients] == [[]] * NUM_CLIENTS
        assert min(client.num_answers for client in clients) > 0
        assert stats.num_migrations > 0
    finally:
        cluster.close()


def strike_until(cluster: BootedCluster, until_s: float, rng: Random) -> int:
    num_strikes = 0
    while time.monotonic() + STRIKE_EVERY_S < until_s:
        time.sleep(STRIKE_EVERY_S)
        pids = [worker.pid for worker in cluster.engine.workers() if worker.pid is not None]
        with suppress(ProcessLookupError):
            os.kill(rng.choice(pids), rng.choice((signal.SIGKILL, signal.SIGSTOP)))
            num_strikes += 1
    return num_strikes
