"""An autoscaler over real processes as load steps up and comes in bursts (F16): it keeps to its
budget, holds still where it sees nothing, and the fleet serves on when it is gone.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.test_workers import answers, requests, tiny_config, undisturbed, wait_until
from headrace.cluster import boot as cluster_boot
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.autoscaler.capacity import Replica
from headrace.core.autoscaler.core import AutoscalerCore
from headrace.core.autoscaler.events import AutoscalerEffect, AutoscalerEvent, Observe
from headrace.core.base.request import Slo
from headrace.core.base.types import Ns
from headrace.core.base.worker import Role
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.config.schema import Config
from support.beside import again_and_again
from support.hasty import BUDGET, hasty, pool

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(180)


class Interrupted:
    """The core itself, which sees nothing, or dies, when a test says so."""

    def __init__(
        self, config: AutoscalerConfig, slo: Slo, replicas: Mapping[Role, Replica]
    ) -> None:
        self._core = AutoscalerCore(config, slo, replicas)

    is_blind = False
    is_killed = False

    def handle(self, now: Ns, event: AutoscalerEvent) -> list[AutoscalerEffect]:
        if self.is_killed:
            raise SystemError("killed")
        if self.is_blind and isinstance(event, Observe):
            return []
        return list(self._core.handle(now, event))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = hasty(tiny_config(tmp_path))
    return replace(config, autoscaler=replace(config.autoscaler, stale_s=0.5))


@pytest.fixture
def scaler(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[Interrupted]:
    """The one of a cluster that is booted."""
    made: list[Interrupted] = []

    def make(replicas: Mapping[Role, Replica]) -> Interrupted:
        made.append(Interrupted(config.autoscaler, config.telemetry.slo, replicas))
        return made[0]

    monkeypatch.setattr(cluster_boot, "make_scaler", lambda *_: make)
    return made


@contextmanager
def most_workers(cluster: BootedCluster) -> Iterator[list[int]]:
    """How many there were at most, those that drain included."""
    most = [0]

    def look() -> None:
        most[0] = max(most[0], len(cluster.engine.workers()))

    with again_and_again(look, 0.01):
        yield most


@pytest.mark.slow
def test_steps_and_bursts_within_a_budget_blindly_and_without_an_autoscaler(
    config: Config, scaler: list[Interrupted]
) -> None:
    load = requests(24)  # a worker has one at a time
    wanted = undisturbed(config, load)
    cluster = boot_cluster(config)
    try:
        with most_workers(cluster) as most:
            for index in range(6):  # how long answers are is known before the step comes
                assert answers(cluster.text_engine, load[index:][:1]) == wanted[index:][:1]
            for _ in range(3):  # a step up, that stays for a while
                assert answers(cluster.text_engine, load) == wanted
            down_s = time_until_one_is_left(cluster)
            for _ in range(2):  # bursts, and quiet between them
                assert answers(cluster.text_engine, load[:12]) == wanted[:12]
                down_s = max(down_s, time_until_one_is_left(cluster))
            for _ in range(3):
                assert answers(cluster.text_engine, load) == wanted
            holds_still_while_blind(cluster, scaler[0], 1.5 * down_s)
            time_until_one_is_left(cluster)
            assert most == [BUDGET]
        assert cluster.engine.stats().num_migrations == 0
        scaler[0].is_killed = True
        assert answers(cluster.text_engine, load) == wanted
        assert [worker.num_starts for worker in cluster.engine.workers()] == [1]
        cluster.engine.check()
        assert answers(cluster.text_engine, load[:1]) == wanted[:1]
    finally:
        cluster.close()


def time_until_one_is_left(cluster: BootedCluster) -> float:
    begin_s = time.monotonic()
    wait_until(lambda: len(cluster.engine.workers()) == 1)
    return time.monotonic() - begin_s


def holds_still_while_blind(
    cluster: BootedCluster, scaler: Interrupted, for_longer_than_s: float
) -> None:
    """For longer than a worker stays that is not needed."""
    scaler.is_blind = True
    until_s = time.monotonic() + for_longer_than_s
    while time.monotonic() < until_s:
        assert pool(cluster).num_wanted == BUDGET == len(cluster.engine.workers())
        time.sleep(0.05)
    scaler.is_blind = False
