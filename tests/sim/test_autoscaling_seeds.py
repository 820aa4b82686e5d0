"""Fleets under an autoscaler, over seeds: loads of any shape, and an autoscaler that dies, restarts
or sees nothing. The budget holds, nothing swings, and every request ends (`simulate_fleet` raises
where one never does).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import pi, sin
from random import Random
from typing import Any

import pytest

from headrace.core.autoscaler.core import AutoscalerCore
from headrace.core.autoscaler.events import (
    AutoscalerEffect,
    AutoscalerEvent,
    Loop,
    Scale,
)
from headrace.core.base.events import CallAt
from headrace.core.base.types import Ns
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.sim.autoscaling import FleetReport, FleetSetup, Scaler, poisson_jobs, simulate_fleet
from headrace.sim.replica import Job
from sim.test_autoscaling import START_S, Rate, drained, ns, turns
from support.autoscaler_rig import MIXED, REPLICA, SLO, config
from support.seeds import FEW_AND_A_THOUSAND

pytestmark = pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)

END_S = 700.0
NEVER = ns(1e9)


@dataclass(frozen=True)
class Load:
    rate: Rate
    most_per_s: float
    most_turns: int  # after which a fleet that follows it has still not swung


def step(rng: Random) -> Load:
    """Up, and down again or for good."""
    low, high = rng.uniform(0.2, 1.5), rng.uniform(2.0, 7.0)
    begin, end = rng.uniform(50, 250), rng.uniform(350, 1000)
    return Load(lambda s: high if begin <= s < end else low, high, 2)


def sine(rng: Random) -> Load:
    """Of which the fleet may follow each top and each bottom once."""
    mean, period = rng.uniform(1.5, 3.5), rng.uniform(300, 700)
    height, begin = rng.uniform(0.3, 0.9) * mean, rng.uniform(0, 2 * pi)
    num_extremes = 2 * END_S / period
    return Load(
        lambda s: mean + height * sin(2 * pi * s / period + begin),
        mean + height,
        2 + int(num_extremes),
    )


def bursts(rng: Random) -> Load:
    """Shorter than a start: they may be answered once, and not each of them anew."""
    low, high = rng.uniform(0.2, 0.6), rng.uniform(2.0, 6.0)
    period, length = rng.uniform(100, 200), rng.uniform(3, 15)
    return Load(lambda s: high if s % period < length else low, high, 2)


def constant(rng: Random) -> Load:
    rate = rng.uniform(0.2, 6.0)
    return Load(lambda s: rate, rate, 1)


@dataclass
class Mortal:
    """An autoscaler that is dead from some time on, and hears nothing any more."""

    scaler: Scaler
    dies_ns: Ns

    def handle(self, now: Ns, event: AutoscalerEvent) -> Sequence[AutoscalerEffect]:
        return self.scaler.handle(now, event) if now < self.dies_ns else ()


@dataclass
class Lives:
    """Of an autoscaler: the first one ends at `dies_ns`, and another one begins when it is asked
    for.
    """

    settings: AutoscalerConfig
    dies_ns: Ns = NEVER
    num: int = 0

    def __call__(self) -> Scaler:
        self.num += 1
        core = AutoscalerCore(self.settings, SLO, {MIXED: REPLICA})
        return Mortal(core, self.dies_ns) if self.num == 1 else core


@dataclass(frozen=True)
class Story:
    settings: AutoscalerConfig
    load: Load
    jobs: list[Job]
    report: FleetReport
    blind: tuple[Ns, Ns]  # nobody decides in between
    num_lives: int


def story(seed: int) -> Story:
    """One of four loads with one of five fates, each equally often."""
    rng = Random(seed)
    load = (step, sine, bursts, constant)[seed % 4](rng)
    least = rng.choice((1, 1, 2))
    settings = config(
        min_replicas=least,
        max_replicas=rng.randrange(max(2, least), 7),
        predictor=rng.choice(("auto", "constant", "trend")),
        max_step_up=rng.randrange(1, 5),
    )
    begin = ns(rng.uniform(100, 350))
    end = Ns(begin + ns(rng.uniform(60, 250)))
    lives, more, blind = Lives(settings), dict[str, Any](), (Ns(0), Ns(0))
    match seed // 4 % 5:
        case 0:  # it is killed, and comes back
            lives.dies_ns, more, blind = begin, {"restarts": (end,)}, (begin, end)
        case 1:  # it restarts at once, twice
            more = {"restarts": (begin, end)}
        case 2:  # metrics are missing, and go stale
            more = {"gaps": ((begin, end),)}
            blind = (Ns(begin + ns(settings.stale_s)), end)
        case 3:  # replicas die
            more = {"deaths": tuple(sorted(ns(rng.uniform(50, 500)) for _ in range(3)))}
    jobs = list(poisson_jobs(load.rate, load.most_per_s, END_S, seed))
    num = rng.randrange(least, settings.max_replicas + 1)
    report = fleet(settings, jobs, scaler=lives, num_replicas=num, **more)
    return Story(settings, load, jobs, report, blind, lives.num)


def test_the_budget_holds_nothing_swings_and_nobody_acts_blindly(seeds: range) -> None:
    num_changes = num_blind = num_restless = 0
    for seed in seeds:
        told = story(seed)
        report, settings = told.report, told.settings
        assert len(report.jobs) == len(told.jobs), seed
        assert report.most_replicas <= settings.max_replicas, seed
        targets = [target for _, target in report.targets]
        assert all(settings.min_replicas <= n <= settings.max_replicas for n in targets), seed
        begin, end = told.blind
        acts = [when for when, effect in report.effects if not isinstance(effect, CallAt)]
        assert not [when for when in acts if begin <= when < end], seed
        # A fresh autoscaler knows less than the lost one, and changes its mind once more.
        most_turns = told.load.most_turns + 2 * (told.num_lives - 1)
        num_more = swings(report) - most_turns
        assert num_more <= 2, seed
        num_restless += num_more > 0
        num_changes += len(targets)
        num_blind += end > begin
    assert num_changes > len(seeds)
    assert num_blind >= len(seeds) // 3
    # A backlog takes more replicas than the load that made it, and who saw nothing for minutes has
    # much to make up for.
    assert num_restless <= len(seeds) // 100


def swings(report: FleetReport) -> int:
    """Turns, but for those that replace the dead."""
    replaced = {
        when
        for when, effect in report.effects
        if isinstance(effect, Scale) and effect.reason.loop is Loop.REPLACE
    }
    own = [(when, target) for when, target in report.targets if when not in replaced]
    return turns(FleetReport(targets=own), own[0][1] if own else 1)


def test_streams_outlive_the_decision_that_their_replica_goes(seeds: range) -> None:
    """Long answers on more replicas than they need: some go, and none that has begun is cut off."""
    num_drained = 0
    for seed in seeds:
        rng = Random(seed)
        num, num_output = rng.randrange(2, 6), rng.randrange(500, 2500)
        arrivals = sorted(rng.uniform(0, 60) for _ in range(rng.randrange(5, 40)))
        jobs = [Job(ns(at), 100, 100, num_output) for at in arrivals]
        report = fleet(config(down_delay_s=rng.uniform(5, 60)), jobs, num_replicas=num)
        assert [one.arrived_ns for one in by_arrival(report)] == [one.arrived_ns for one in jobs]
        # One that was begun again elsewhere would pause for as long as its prompt takes to compute.
        assert all(job.tpot_ms < 1.2 * (SLO.itl_ms or 0) for job in report.jobs), seed
        assert report.targets[-1][1] == 1, seed
        num_drained += drained(report)
    assert num_drained > len(seeds)


def test_whoever_finds_a_sleeping_pool_waits_for_one_cold_start(seeds: range) -> None:
    """Some that come before it has gone to sleep, some while it starts, some long afterwards."""
    num_cold = 0
    for seed in seeds:
        rng = Random(seed)
        idle_s, start_s = rng.uniform(20, 90), rng.uniform(1, 60)
        jobs = list(visits(rng))
        settings = config(min_replicas=0, idle_s=idle_s, start_up_s=start_s)
        report = fleet(settings, jobs, start_up_ns=ns(start_s), end_ns=ns(3000))
        assert len(report.jobs) == len(jobs), seed
        longest_ms = max(job.ttft_ms for job in report.jobs)
        assert longest_ms < start_s * 1e3 + 1000.0, seed
        num_cold += longest_ms > 0.9 * start_s * 1e3
        assert report.targets[-1][1] == 0, seed
        assert {target for _, target in report.targets} <= {0, 1}, seed
    assert num_cold > 0.8 * len(seeds)


def visits(rng: Random) -> Iterator[Job]:
    at_s = 1.0
    for _ in range(rng.randrange(4, 12)):
        yield Job(ns(at_s), 100, 100, rng.randrange(1, 40))
        at_s += rng.choice((rng.uniform(0, 5), rng.uniform(0, 120), rng.uniform(150, 300)))


def by_arrival(report: FleetReport) -> list[Job]:
    return sorted(report.jobs, key=lambda job: job.arrived_ns)


def fleet(settings: AutoscalerConfig, jobs: list[Job], **setup: Any) -> FleetReport:
    return simulate_fleet(
        FleetSetup(
            **{
                "scaler": Lives(settings),
                "replica": REPLICA,
                "slo": SLO,
                "jobs": jobs,
                "end_ns": ns(END_S),
                "start_up_ns": ns(START_S),
                **setup,
            }
        )
    )
