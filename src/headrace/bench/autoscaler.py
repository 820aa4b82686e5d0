"""A day of load that rises and falls, under several rules for how many replicas there are.

    python -m headrace.bench.autoscaler [NAME ...] [--json]

prints the comparison, of all rules or of those named. Decides the load and who is compared; refuses
to know how any of them decides. Everything runs under a virtual clock, so the figures are the same
on every machine. A rule takes about a minute.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from math import ceil, pi, sin
from typing import Final

import msgspec

from headrace.core.autoscaler.capacity import Replica
from headrace.core.autoscaler.core import AutoscalerCore
from headrace.core.autoscaler.events import (
    AutoscalerEffect,
    AutoscalerEvent,
    Drain,
    Loop,
    Observe,
    PoolWindow,
    Reason,
    ReplicaDown,
    ReplicaUp,
    Scale,
)
from headrace.core.base.metrics import percentile
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.sim.autoscaling import FleetReport, FleetSetup, Scaler, poisson_jobs, simulate_fleet

DAY_S: Final = 86_400.0
START_UP_S: Final = 120.0
MOST_PER_S: Final = 6.0
SLO: Final = Slo(ttft_ms=3000.0, itl_ms=100.0)


def slow_cost(factor: float) -> FittedCostModel:
    """The prior, of a machine that takes so many times as long for everything."""
    prior = FittedCostModel.prior()
    return FittedCostModel(
        name=f"prior, {factor:g} times as slow",
        knot_ns=tuple(knot * factor for knot in prior.knot_ns),
        seq_ns=prior.seq_ns * factor,
        logit_row_ns=prior.logit_row_ns * factor,
        attention_pair_ns=prior.attention_pair_ns * factor,
        kv_token_ns=prior.kv_token_ns * factor,
    )


REPLICA: Final = Replica(cost=slow_cost(2.0))
CONFIG: Final = AutoscalerConfig(max_replicas=12, start_up_s=START_UP_S)
SEED: Final = 1


def rate_at(second: float) -> float:
    """Requests per second: one half at night, 4.5 in the afternoon, one more in a sudden lunch
    hour.
    """
    hour = second / 3600.0 % 24.0
    day = max(0.0, sin(pi * (hour - 6.0) / 16.0)) if 6.0 <= hour <= 22.0 else 0.0
    lunch = 1.0 if 12.0 <= hour < 13.0 else 0.0
    return 0.5 + 4.0 * day + lunch


class Fixed:
    """As many replicas as there were at the begin."""

    def handle(self, now: Ns, event: AutoscalerEvent) -> list[AutoscalerEffect]:
        return []


class Reactive:
    """The rule of most autoscalers: replicas = ceil(replicas · requests in flight / target of one),
    with a tolerance of 10 %, and down only to the most of the last five minutes.
    """

    def __init__(self, num_in_flight: float, *, stabilisation_s: float = 300.0) -> None:
        self._num_in_flight = num_in_flight
        self._stabilisation_ns = stabilisation_s * NS_PER_S
        self._active: list[WorkerId] = []
        self._wanted: list[tuple[Ns, int]] = []

    def handle(self, now: Ns, event: AutoscalerEvent) -> list[AutoscalerEffect]:
        match event:
            case ReplicaUp(_, replica_id):
                self._active.append(replica_id)
            case ReplicaDown(_, replica_id) if replica_id in self._active:
                self._active.remove(replica_id)
            case Observe(window) if self._active:
                return self._decide(now, window)
        return []

    def _decide(self, now: Ns, window: PoolWindow) -> list[AutoscalerEffect]:
        # A queue is all requests that have no token yet: those that arrived in its time.
        queue_s = sum(load.queue_ms for load in window.replicas) / 1e3
        waiting = queue_s * window.num_arrivals * NS_PER_S / window.span_ns / len(self._active)
        running = sum(load.num_running for load in window.replicas)
        ratio = (running + waiting) / len(self._active) / self._num_in_flight
        num = len(self._active)
        wanted = num if abs(ratio - 1.0) <= 0.1 else ceil(num * ratio)
        wanted = min(max(1, wanted), CONFIG.max_replicas)
        since_ns = now - self._stabilisation_ns
        self._wanted = [(at, n) for at, n in self._wanted if at > since_ns] + [(now, wanted)]
        target = max(n for _, n in self._wanted)
        reason = Reason(loop=Loop.LOAD, num_wanted=wanted)
        leaving = self._active[target:]
        del self._active[target:]
        drains = [Drain(Role.MIXED, replica_id, reason) for replica_id in leaving]
        return [*drains, Scale(Role.MIXED, target, reason)]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    rule: str
    num_requests: int
    replica_hours: float  # from being asked for until gone
    most_replicas: int
    attainment: float
    ttft_ms_p50: float
    ttft_ms_p90: float
    ttft_ms_p99: float
    tpot_ms_p90: float
    num_ups: int
    num_downs: int


class Rule(msgspec.Struct, frozen=True):
    scaler: Callable[[], Scaler]
    num_replicas: int = 1  # at the begin
    num_days: int = 1  # of which the last one counts


def core(predictor: str, num_days: int = 1) -> Rule:
    config = replace(CONFIG, predictor=predictor)
    return Rule(lambda: AutoscalerCore(config, SLO, {Role.MIXED: REPLICA}), num_days=num_days)


RULES: Final = {
    "fixed 3": Rule(Fixed, 3),
    "fixed 4": Rule(Fixed, 4),
    "reactive 4": Rule(lambda: Reactive(4.0)),
    "reactive 8": Rule(lambda: Reactive(8.0)),
    "reactive 12": Rule(lambda: Reactive(12.0)),
    "constant": core("constant"),
    "trend": core("trend"),
    "auto": core("auto"),
    "auto, second day": core("auto", 2),
}


def run(name: str) -> Row:
    rule = RULES[name]
    end_s = rule.num_days * DAY_S
    report = simulate_fleet(
        FleetSetup(
            scaler=rule.scaler,
            replica=REPLICA,
            slo=SLO,
            jobs=poisson_jobs(rate_at, MOST_PER_S, end_s, SEED),
            begin_ns=Ns(round((end_s - DAY_S) * NS_PER_S)),
            end_ns=Ns(round(end_s * NS_PER_S)),
            start_up_ns=Ns(round(START_UP_S * NS_PER_S)),
            num_replicas=rule.num_replicas,
        )
    )
    return _row(name, report)


def _row(name: str, report: FleetReport) -> Row:
    ttft = sorted(job.ttft_ms for job in report.jobs)
    tpot = sorted(job.tpot_ms for job in report.jobs)
    return Row(
        rule=name,
        num_requests=len(report.jobs),
        replica_hours=report.replica_ns / NS_PER_S / 3600,
        most_replicas=report.most_replicas,
        attainment=report.attainment,
        ttft_ms_p50=percentile(ttft, 0.5),
        ttft_ms_p90=percentile(ttft, 0.9),
        ttft_ms_p99=percentile(ttft, 0.99),
        tpot_ms_p90=percentile(tpot, 0.9),
        num_ups=report.num_ups,
        num_downs=report.num_downs,
    )


def main(arguments: list[str]) -> None:
    names = [word for word in arguments if word != "--json"] or list(RULES)
    if unknown := [name for name in names if name not in RULES]:
        sys.exit(f"no such rule: {unknown[0]}; known: {', '.join(RULES)}")
    if "--json" in arguments:
        print(msgspec.json.encode([run(name) for name in names]).decode())
        return
    print(
        "| rule | replica-hours | most | attainment | TTFT p50 · p90 · p99 ms | TPOT p90 ms | ± |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in names:
        row = run(name)
        print(
            f"| {row.rule} | {row.replica_hours:.1f} | {row.most_replicas}"
            f" | {100 * row.attainment:.2f} %"
            f" | {row.ttft_ms_p50:,.0f} · {row.ttft_ms_p90:,.0f} · {row.ttft_ms_p99:,.0f}"
            f" | {row.tpot_ms_p90:.0f} | +{row.num_ups} −{row.num_downs} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
