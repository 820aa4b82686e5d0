"""The autoscaler over a fleet under a virtual clock: replicas start late, drain and die, and no
request is lost (`simulate_fleet` raises where one never ends).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import pi, sin
from typing import Any

import pytest

from headrace.core.autoscaler.capacity import Capacity, Traffic
from headrace.core.autoscaler.core import AutoscalerCore
from headrace.core.autoscaler.events import Drain, Loop, Scale
from headrace.core.base.metrics import percentile
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.sim.autoscaling import FleetReport, FleetSetup, poisson_jobs, simulate_fleet
from headrace.sim.replica import Job
from support.autoscaler_rig import MIXED, REPLICA, SLO, config

START_S = 30.0
Rate = Callable[[float], float]


def ns(seconds: float) -> Ns:
    return Ns(round(seconds * NS_PER_S))


def run(
    rate: Rate, most: float, end_s: float, seed: int = 1, settings: Any = None, **setup: Any
) -> FleetReport:
    asked: AutoscalerConfig = settings or config()
    return simulate_fleet(
        FleetSetup(
            scaler=lambda: AutoscalerCore(asked, SLO, {MIXED: REPLICA}),
            replica=REPLICA,
            slo=SLO,
            **{
                "jobs": poisson_jobs(rate, most, end_s, seed),
                "end_ns": ns(end_s),
                "start_up_ns": ns(START_S),
                **setup,
            },
        )
    )


def turns(report: FleetReport, num: int = 1) -> int:
    """How often the fleet changed its mind: went up after down, or down after up."""
    counts = [num, *(target for _, target in report.targets)]
    signs = [after > before for before, after in pairwise(counts)]
    return sum(before != after for before, after in pairwise(signs))


def drained(report: FleetReport) -> int:
    return sum(isinstance(effect, Drain) for _, effect in report.effects)


# ---- loads


@pytest.mark.parametrize("seed", range(3))
def test_a_step_up_and_down_is_followed_once(seed: int) -> None:
    report = run(lambda s: 6.0 if 200 <= s < 800 else 1.0, 6.0, 1300, seed)
    assert turns(report) <= 2
    assert report.targets[-1][1] == 1
    assert 3 <= max(target for _, target in report.targets) <= 7


def test_a_sine_is_followed_without_flapping() -> None:
    """Three periods of ten minutes: a turn at most at each top and each bottom."""
    report = run(lambda s: 3.5 + 2.5 * sin(2 * pi * s / 600), 6.0, 1800)
    assert 3 <= turns(report) <= 6


def test_bursts_shorter_than_a_start_move_nothing() -> None:
    """Ten seconds of six times the load, every two minutes."""
    report = run(lambda s: 3.0 if s % 120 < 10 else 0.5, 3.0, 1200)
    assert report.targets == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", [1.5, 2.8, 5.5])
def test_constant_load_with_all_its_noise_comes_to_rest(rate: float, seed: int) -> None:
    report = run(lambda s: rate, rate, 900, seed, AutoscalerConfig(start_up_s=START_S))
    assert turns(report) <= 1
    assert all(target >= 1 for _, target in report.targets)


def test_the_budget_holds_with_starting_and_draining_replicas() -> None:
    settings = config(max_replicas=3)
    report = run(lambda s: 14.0 if s < 100 else 0.5, 14.0, 700, settings=settings)
    assert report.most_replicas == 3
    assert report.targets[-1][1] == 1


# ---- faults


def test_an_autoscaler_that_restarts_leaves_the_fleet_alone() -> None:
    def followed(restarts: tuple[Ns, ...]) -> FleetReport:
        return run(lambda s: 5.0, 5.0, 900, restarts=restarts, num_replicas=3)

    at_ns = ns(450)
    report = followed((at_ns,))
    soon = [target for when, target in report.targets if at_ns <= when < at_ns + ns(60)]
    assert soon == []
    assert report.attainment > 0.9


def test_no_news_no_change() -> None:
    """The load falls and rises while nobody can see it."""
    gap = (ns(300), ns(800))
    report = run(lambda s: 1.0 if 350 < s < 600 else 5.0, 5.0, 1000, gaps=(gap,), num_replicas=3)
    blind = [when for when, _ in report.effects if gap[0] + ns(30) <= when < gap[1]]
    assert blind == []


def test_dead_replicas_are_replaced_and_their_requests_end_elsewhere() -> None:
    report = run(lambda s: 4.0, 4.0, 600, deaths=(ns(200), ns(210), ns(400)), num_replicas=2)
    reasons = [one.reason.loop for _, one in report.effects if isinstance(one, Scale)]
    assert reasons.count(Loop.REPLACE) == 3


def test_streams_outlive_the_decision_that_their_replica_goes() -> None:
    """Long answers on four replicas, of which three are drained meanwhile."""
    jobs = [Job(ns(i), 100, 100, 2000) for i in range(40)]
    report = run(lambda s: 0.0, 1.0, 900, jobs=jobs, num_replicas=4)
    assert drained(report) >= 3
    assert len(report.jobs) == 40
    assert {job.num_output for job in report.jobs} == {2000}


# ---- sleep

SLEEPY = config(min_replicas=0, idle_s=60.0)


def test_a_request_to_a_sleeping_pool_waits_for_a_cold_start() -> None:
    jobs = [Job(ns(1), 100, 100, 20), Job(ns(600), 100, 100, 20), Job(ns(601), 100, 100, 20)]
    report = run(lambda s: 0.0, 1.0, 900, settings=SLEEPY, jobs=jobs)
    assert [target for _, target in report.targets] == [0, 1, 0]
    first, woke, behind = report.jobs
    assert first.ttft_ms < 1000.0
    assert START_S * 1e3 < woke.ttft_ms < START_S * 1e3 + 1000.0
    assert behind.ttft_ms < woke.ttft_ms
    assert report.replica_ns < ns(400)


def test_nobody_pays_while_nobody_asks() -> None:
    report = run(lambda s: 0.0, 1.0, 3600, settings=SLEEPY, jobs=[])
    assert report.replica_ns <= ns(130)


# ---- the simulation itself


def test_the_same_seed_has_the_same_story() -> None:
    def story() -> FleetReport:
        return run(lambda s: 4.0, 4.0, 300, seed=7)

    one, other = story(), story()
    assert one.effects == other.effects
    assert [job.done_ns for job in one.jobs] == [job.done_ns for job in other.jobs]


def test_what_is_paid_is_what_was_held() -> None:
    settings = replace(config(), max_replicas=2, min_replicas=2)
    report = run(lambda s: 1.0, 1.0, 500, settings=settings, num_replicas=2)
    assert report.replica_ns == 2 * ns(500)


@pytest.mark.parametrize(("num", "rate"), [(1, 2.0), (1, 2.5), (3, 6.0), (3, 8.4)])
def test_what_the_cost_model_says_of_a_fleet_is_what_comes_of_it(num: int, rate: float) -> None:
    """TTFT at the 90th percentile below four fifths of the throughput, within a factor of 2.5."""
    steady = config(min_replicas=num, max_replicas=num)
    report = run(lambda s: rate, rate, 900, settings=steady, num_replicas=num)
    capacity = Capacity(REPLICA, Traffic(400, 300, 100), SLO, percentile="p90", margin=0.2)
    ttft_ms = sorted(job.ttft_ms for job in report.jobs)
    ratio = capacity.forecast(rate, num).ttft_ms / percentile(ttft_ms, 0.9)
    assert 0.4 < ratio < 2.5
