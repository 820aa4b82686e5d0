"""An autoscaler over real processes: workers come with the load and go without it, and no stream
notices.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from chaos.test_workers import Answer, answers, requests, tiny_config, undisturbed, wait_until
from headrace.cluster import boot as cluster_boot
from headrace.cluster.boot import BootedCluster, boot_cluster
from headrace.core.autoscaler.capacity import Replica
from headrace.core.autoscaler.events import (
    AutoscalerEffect,
    AutoscalerEvent,
    Drain,
    Loop,
    Observe,
    Reason,
    ReplicaDown,
    ReplicaUp,
    RoleSwitched,
    Scale,
    SwitchRole,
)
from headrace.core.base.errors import ConfigError, RequestError
from headrace.core.base.events import CallAt
from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config, SchedulerConfig
from headrace.live.generate import GenerateRequest
from support.hasty import hasty, pool
from support.http_server import running_server

pytest.importorskip("headrace.ops.native._native")
pytestmark = pytest.mark.timeout(120)

SEVERAL = SchedulerConfig(max_running_seqs=8)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = hasty(tiny_config(tmp_path_factory.mktemp("model")))
    return replace(config, router=replace(config.router, worker_wait_s=0.5))


@pytest.fixture(scope="module")
def asked() -> list[GenerateRequest]:
    return requests(8)


@pytest.fixture(scope="module")
def wanted(config: Config, asked: list[GenerateRequest]) -> list[Answer]:
    return undisturbed(config, asked)


@contextmanager
def running(config: Config) -> Iterator[BootedCluster]:
    cluster = boot_cluster(config)
    try:
        yield cluster
        cluster.engine.check()
    finally:
        cluster.close()


@pytest.mark.slow
def test_workers_come_with_the_load_and_go_without_it(config: Config) -> None:
    burst = requests(24)  # at once, and a worker has one at a time
    wanted = undisturbed(config, burst)
    with running(config) as cluster:
        for index in range(6):  # how long answers are is known before the burst comes
            assert answers(cluster.text_engine, burst[index:][:1]) == wanted[index:][:1]
        assert answers(cluster.text_engine, burst) == wanted
        # It has come up while the burst was served, so nothing of that was lost when it went.
        assert len(cluster.engine.workers()) == 2
        wait_until(lambda: len(cluster.engine.workers()) == 1)
        assert pool(cluster).loop == Loop.THROUGHPUT
        assert cluster.engine.stats().num_migrations == 0
        assert answers(cluster.text_engine, burst[:2]) == wanted[:2]


def test_a_pool_that_sleeps_wakes_for_a_request_and_refuses_none(
    config: Config, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    sleepy = replace(config.autoscaler, min_replicas=0)
    with running(replace(config, autoscaler=sleepy)) as cluster:
        assert answers(cluster.text_engine, asked) == wanted
        wait_until(lambda: not cluster.engine.workers())
        with running_server(cluster) as server:
            # A balancer that sent nobody would never wake it.
            assert httpx.get(f"{server.url}/ready").status_code == 200
            text = httpx.get(f"{server.url}/metrics").text
            for line in (
                'headrace_autoscaler_wanted_workers{role="mixed"} 0.0',
                'headrace_autoscaler_workers{role="mixed",state="ready"} 0.0',
                'limited="false",loop="idle",role="mixed"} 1.0',
            ):
                assert line in text
        assert answers(cluster.text_engine, asked) == wanted
        assert pool(cluster).num_wanted >= 1


def test_a_worker_that_dies_is_replaced_and_not_taken_for_one_that_left(
    config: Config, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    quiet = replace(config.autoscaler, max_replicas=1)
    with running(replace(config, autoscaler=quiet)) as cluster:
        assert answers(cluster.text_engine, asked) == wanted
        (worker,) = cluster.engine.workers()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: pool(cluster).num_ready == 1 and pool(cluster).loop == Loop.REPLACE)
        assert [one.num_starts for one in cluster.engine.workers()] == [2]
        assert answers(cluster.text_engine, asked) == wanted


class Obedient:
    """Wants at its next event what a test puts there, and fails where that is None."""

    def __init__(self, replicas: Mapping[Role, Replica]) -> None:
        self.effects: list[AutoscalerEffect] | None = []
        self.events: list[AutoscalerEvent] = []

    def handle(self, now: Ns, event: AutoscalerEvent) -> list[AutoscalerEffect]:
        self.events.append(event)
        assert self.effects is not None
        effects, self.effects = self.effects, []
        return [*effects, CallAt(Ns(now + 20 * NS_PER_MS), 0)]


@pytest.fixture
def scaler(monkeypatch: pytest.MonkeyPatch) -> Obedient:
    obedient = Obedient({})
    monkeypatch.setattr(cluster_boot, "make_scaler", lambda *_: lambda _: obedient)
    return obedient


REASON = Reason(loop=Loop.LOAD, num_wanted=1)
FIRST = WorkerId(0)  # that has come up


def test_a_worker_that_is_drained_ends_its_streams_first(
    config: Config, scaler: Obedient, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    several = replace(config, cluster=replace(config.cluster, workers=2), scheduler=SEVERAL)
    with running(several) as cluster:

        def drain() -> None:
            scaler.effects = [Drain(Role.MIXED, FIRST, REASON), Scale(Role.MIXED, 1, REASON)]

        assert answers(cluster.text_engine, asked, strike=drain) == wanted
        wait_until(lambda: len(cluster.engine.workers()) == 1)
        assert cluster.engine.stats().num_migrations == 0
        assert answers(cluster.text_engine, asked) == wanted
        scaler.effects = [Scale(Role.MIXED, 2, REASON)]
        wait_until(lambda: pool(cluster).num_ready == 2)
        assert answers(cluster.text_engine, asked) == wanted
        ups_and_downs = [one for one in scaler.events if isinstance(one, ReplicaUp | ReplicaDown)]
        assert ups_and_downs[2:] == [
            ReplicaDown(Role.MIXED, FIRST),
            ReplicaUp(Role.MIXED, WorkerId(2)),
        ]


def test_a_worker_changes_its_role_under_streams(
    config: Config, scaler: Obedient, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    apart = ClusterConfig(prefill=1, decode=2, handoff="always", restart_delay_s=0)
    roomy = replace(config.autoscaler, max_replicas=3)
    with running(replace(config, cluster=apart, scheduler=SEVERAL, autoscaler=roomy)) as cluster:

        def decoding() -> list[WorkerId]:
            ups = [one for one in list(scaler.events) if isinstance(one, ReplicaUp)]
            return [one.replica_id for one in ups if one.role is Role.DECODE]

        wait_until(lambda: bool(decoding()))
        victim = decoding()[0]

        def switch() -> None:
            scaler.effects = [SwitchRole(victim, Role.DECODE, Role.PREFILL, REASON)]

        assert answers(cluster.text_engine, asked, strike=switch) == wanted
        switched = RoleSwitched(victim, Role.DECODE, Role.PREFILL)
        wait_until(lambda: switched in scaler.events)
        assert not any(isinstance(one, ReplicaDown) for one in scaler.events)
        assert [one.num_starts for one in cluster.engine.workers()] == [1, 1, 1]
        assert cluster.engine.stats().num_migrations == 0
        ready = {one.role: one.num_ready for one in cluster.engine.pools()}
        assert ready == {Role.PREFILL: 2, Role.DECODE: 1}
        assert answers(cluster.text_engine, asked) == wanted
        windows = [one.window for one in scaler.events if isinstance(one, Observe)]
        arrived = {
            role: sum(window.num_arrivals for window in windows if window.role is role)
            for role in (Role.PREFILL, Role.DECODE)
        }
        assert arrived == dict.fromkeys(arrived, 2 * len(asked))


def test_an_operator_moves_workers_between_pools_that_there_are(
    config: Config, scaler: Obedient, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    apart = ClusterConfig(prefill=1, decode=2, handoff="always", restart_delay_s=0)
    roomy = replace(config.autoscaler, max_replicas=3)
    with running(replace(config, cluster=apart, scheduler=SEVERAL, autoscaler=roomy)) as cluster:
        wait_until(lambda: len(cluster.engine.pools()) == 2)
        with pytest.raises(RequestError, match="no pool of mixed workers"):
            cluster.engine.set_role("d0", Role.MIXED).result(10.0)
        cluster.engine.set_role("d0", Role.PREFILL).result(10.0)
        wait_until(lambda: any(isinstance(one, RoleSwitched) for one in scaler.events))
        ready = {one.role: one.num_ready for one in cluster.engine.pools()}
        assert ready == {Role.PREFILL: 2, Role.DECODE: 1}
        assert answers(cluster.text_engine, asked) == wanted


def test_without_an_autoscaler_everything_stays_as_it_is(
    config: Config, scaler: Obedient, asked: list[GenerateRequest], wanted: list[Answer]
) -> None:
    with running(config) as cluster:
        scaler.effects = None
        num_events = len(scaler.events)
        wait_until(lambda: len(scaler.events) > num_events)  # and it fails
        assert answers(cluster.text_engine, asked) == wanted
        assert len(scaler.events) == num_events + 1
        assert [worker.num_starts for worker in cluster.engine.workers()] == [1]
        (worker,) = cluster.engine.workers()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        assert answers(cluster.text_engine, asked) == wanted


@pytest.mark.parametrize(
    "cluster", [{"workers": 2, "prefill": 1}, {"listen": "127.0.0.1:0"}, {"decode": 1}]
)
def test_some_clusters_cannot_be_scaled(config: Config, cluster: dict[str, object]) -> None:
    odd = ClusterConfig(**cluster)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scal"):
        boot_cluster(replace(config, cluster=odd))
