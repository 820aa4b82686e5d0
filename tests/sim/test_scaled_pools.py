"""Prefill and decode pools under the autoscaler that serves, while the traffic's mix changes: long
prompts first, then long answers. Workers change their roles in place, and no request is lost
(`simulate_cluster` raises where one does not end exactly once).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from headrace.bench.roles import CASES, DEVICE, LAYOUT, SLO, measure, mix
from headrace.core.base.errors import ConfigError
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.router.events import WorkerDown, WorkerDrain, WorkerRole, WorkerUp
from headrace.core.router.front_events import FrontEffect, FrontEvent
from headrace.core.workload.source import Listed
from headrace.sim.cluster import Cluster, ClusterReport, Death, random_deaths, simulate_cluster
from headrace.sim.scaling import Autoscale
from headrace.sim.setup import Layout, build_cluster
from support.seeds import FEW_AND_A_THOUSAND

SETTINGS = AutoscalerConfig(
    max_replicas=4,
    warm_up_s=10.0,
    breach_s=10.0,
    throughput_interval_s=30.0,
    down_delay_s=600.0,
    role_cooldown_s=60.0,
)


def pools(source: Listed, settings: AutoscalerConfig = SETTINGS, **fields: Any) -> Cluster:
    cluster = build_cluster(
        DEVICE,
        LAYOUT,
        source,
        handoff="always",
        slo=SLO,
        autoscale=Autoscale(config=settings, start_up_s=30.0),
    )
    return replace(cluster, stats_period_ms=250.0, **fields)


@dataclass
class Watch:
    """Who is there as the front end has it, and how few decoded after any decision."""

    roles: dict[WorkerId, Role] = field(default_factory=dict)
    fewest: int = 1
    is_sound: bool = True  # no worker goes but those that drain, or die
    draining: set[WorkerId] = field(default_factory=set)
    num_switched: int = 0

    def see(self, now: Ns, event: FrontEvent, effects: Sequence[FrontEffect]) -> None:
        match event:
            case WorkerUp():
                self.roles[event.worker_id] = event.role
                return
            case WorkerDrain(worker_id):
                self.draining.add(worker_id)
            case WorkerRole(worker_id, role):
                self.num_switched += self.roles[worker_id] is not role
                self.roles[worker_id] = role
            case WorkerDown(worker_id, _, is_failure):
                self.is_sound &= is_failure or worker_id in self.draining
                del self.roles[worker_id]
                return
            case _:
                return
        staying = [role for one, role in self.roles.items() if one not in self.draining]
        self.fewest = min(self.fewest, staying.count(Role.DECODE))


def run(cluster: Cluster) -> tuple[ClusterReport, Watch]:
    watch = Watch()
    return simulate_cluster(cluster, observe=watch.see), watch


def switches(report: ClusterReport) -> list[tuple[float, Role]]:
    assert report.scaling is not None
    return [(now / NS_PER_S, one.to_role) for now, one in report.scaling.switches]


@pytest.mark.timeout(300)
def test_workers_follow_the_mix_without_a_start() -> None:
    """Ten minutes of long prompts, ten of long answers, and as many workers as there may be."""
    source = mix(Random(1), 600.0)
    num = len(list(source.arrivals()))
    report, watch = run(pools(source))
    assert len(report.records) == num
    assert report.num_migrations == 0
    before = [role for at_s, role in switches(report) if at_s < 600.0]
    after = [role for at_s, role in switches(report) if at_s >= 600.0]
    assert Role.PREFILL in before
    assert Role.DECODE in after
    assert watch.num_switched == len(before) + len(after)
    assert {use.name for use in report.workers} == {f"worker-{i}" for i in range(4)}


@pytest.mark.slow
def test_switches_pay_where_no_split_is_right_for_both_halves() -> None:
    by_name = {case.name: case for case in CASES}
    switches, fixed = (measure(by_name[name], 0, 0.8, 1.5) for name in ("switches", "fixed 2 + 2"))
    assert switches["num_switches"] > 1
    assert switches["goodput_per_s"] > 1.5 * fixed["goodput_per_s"]


def test_parts_of_a_life_are_those_of_its_roles() -> None:
    """What a worker did in each role, and for how long, adds up to what it did."""
    report, _ = run(pools(mix(Random(3), 240.0)))
    switched = {use.name for use in report.workers if use.role is Role.PREFILL} & {
        use.name for use in report.workers if use.role is Role.DECODE
    }
    assert switched
    for name in (f"worker-{i}" for i in range(4)):
        parts = [use for use in report.workers if use.name == name]
        assert sum(use.up_ns for use in parts) == report.end_ns
        assert all(0 <= use.busy_ns <= use.up_ns for use in parts)
        assert all(use.stats.num_steps >= 0 for use in parts)


def test_the_same_seed_has_the_same_story() -> None:
    first, _ = run(pools(mix(Random(2), 120.0)))
    second, _ = run(pools(mix(Random(2), 120.0)))
    assert first.trace_hash == second.trace_hash
    assert first.scaling == second.scaling


def test_mixed_workers_beside_others_are_not_scaled() -> None:
    asked = Autoscale(config=SETTINGS)
    cluster = build_cluster(DEVICE, Layout(mixed=1, prefill=1, decode=1), Listed(()))
    with pytest.raises(ConfigError, match="one kind"):
        simulate_cluster(replace(cluster, autoscale=asked))


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_no_request_is_lost_and_the_laws_hold(seeds: range) -> None:
    """With more or fewer workers than there may be, in a third of the seeds while they die."""
    num_switches = num_moved = 0
    for seed in seeds:
        rng = Random(seed)
        settings = replace(
            SETTINGS,
            max_replicas=rng.choice((4, 4, 5)),
            down_delay_s=rng.choice((60.0, 600.0)),
            role_cooldown_s=rng.uniform(20.0, 90.0),
        )
        source = mix(rng, 150.0, prompts=rng.uniform(0.4, 0.6), answers=rng.uniform(0.8, 1.1))
        num = len(list(source.arrivals()))
        deaths: tuple[Death, ...] = ()
        if seed % 3 == 2:
            deaths = random_deaths(4, mean_life_s=200.0, start_up_s=20.0, until_s=300.0, seed=seed)
        report, watch = run(pools(source, settings, deaths=deaths, seed=seed))
        assert len(report.records) + len(report.refused_ns) == num, seed
        assert not report.refused_ns or deaths, seed
        assert report.num_migrations == 0 or deaths, seed
        scaling = report.scaling
        assert scaling is not None
        assert scaling.most_workers <= settings.max_replicas, seed
        assert watch.is_sound, seed
        assert watch.fewest >= 1 or deaths, seed
        times = [at_s for at_s, _ in switches(report)]
        gaps = [later - sooner for sooner, later in pairwise(times)]
        assert all(gap >= settings.role_cooldown_s for gap in gaps), seed
        num_switches += len(times)
        num_moved += watch.num_switched
    assert num_switches >= len(seeds) // 2
    assert num_switches - len(seeds) // 5 <= num_moved <= num_switches
