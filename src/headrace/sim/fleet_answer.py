"""What a search for a fleet found: rows, the front of cost against attainment, what binds.

Decides which constraint a fleet is at by the causes of misses; refuses to know what was tried when.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Final

import msgspec

from headrace.core.telemetry import Cause
from headrace.plan.fleet import Bound, Constraint, Refusal, WorkerKind
from headrace.sim.fleet_trial import Fleet, Interval, Measured, Misses, Traffic

NEAR_FULL: Final = 0.9  # of capacity or memory: beyond it they are the reason, not chance


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is."""

    accelerator: str
    tp: int
    pp: int
    ep: int
    num_gpus: int
    usd_per_hour: float

    @classmethod
    def of(cls, kind: WorkerKind) -> "WorkerRow":
        layout = kind.layout
        return cls(
            accelerator=kind.accelerator,
            tp=layout.tp,
            pp=layout.pp,
            ep=layout.ep,
            num_gpus=kind.num_gpus,
            usd_per_hour=kind.usd_per_hour,
        )


class FleetRow(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet that was measured over all seeds. Figures are means over them."""

    name: str
    accelerator: str  # of workers that decode, as is `tp`
    tp: int
    prefill_worker: WorkerRow | None  # None = all do both
    decode_worker: WorkerRow
    mode: str
    prefill_workers: int
    decode_workers: int
    policy: str
    num_gpus: int
    usd_per_hour: float
    usd_per_million_good_output_tokens: Interval | None  # None = a seed without any
    attainment: Interval
    holds: bool
    is_on_front: bool
    goodput_per_s: float
    good_output_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    hit_rate: float


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest fleet of another shape that holds. `more` is what it costs beyond the best, as a
    share, seed by seed on the same requests.
    """

    name: str
    more: Interval
    is_within_noise: bool


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    constraint: str
    reason: str


class FleetAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`rows` are in the order of their cost. No best = nothing that was looked at holds."""

    attainment: float
    load_per_s: float
    num_requests_per_run: int
    seeds: tuple[int, ...]
    rows: tuple[FleetRow, ...]
    best: FleetRow | None
    runner_up: RunnerUp | None
    binds: Binding | None
    refused: tuple[Refusal, ...]
    num_runs: int
    is_complete: bool  # False = the time budget ended it


def answer_of(
    traffic: Traffic,
    target: float,
    seeds: tuple[int, ...],
    measured: Sequence[Measured],
    bounds: Mapping[str, Bound],
    refused: Sequence[Refusal],
    *,
    num_runs: int,
    is_complete: bool,
) -> FleetAnswer:
    """`bounds` are by the names of shapes."""
    measured = sorted(measured, key=lambda one: one.rank)
    holding = [one for one in measured if one.holds(target)]
    best = holding[0] if holding else None
    others = [one for one in holding if best and str(one.fleet.shape) != str(best.fleet.shape)]
    front = {str(one.fleet) for one in pareto(measured)}
    rows = {
        str(one.fleet): row_of(one, holds=one.holds(target), is_on_front=str(one.fleet) in front)
        for one in measured
    }
    return FleetAnswer(
        attainment=target,
        load_per_s=traffic.load_per_s,
        num_requests_per_run=traffic.num_counted,
        seeds=seeds,
        rows=tuple(rows.values()),
        best=rows[str(best.fleet)] if best else None,
        runner_up=compare(best, others[0]) if best and others else None,
        binds=binding(best.fleet, measured, bounds, target) if best else None,
        refused=tuple(refused),
        num_runs=num_runs,
        is_complete=is_complete,
    )


def pareto(measured: Sequence[Measured]) -> list[Measured]:
    """Those that no other one beats in both cost and attainment; `measured` by cost."""
    front: list[Measured] = []
    for one in measured:
        if not front or one.attainment.mean > front[-1].attainment.mean:
            front.append(one)
    return front


def compare(best: Measured, other: Measured) -> RunnerUp:
    pairs = zip(best.costs, other.costs, strict=True)
    more = Interval.of([theirs / ours - 1.0 for ours, theirs in pairs])
    is_within_noise = more.low is None or more.low <= 0.0
    return RunnerUp(name=str(other.fleet), more=more, is_within_noise=is_within_noise)


def row_of(one: Measured, *, holds: bool, is_on_front: bool) -> FleetRow:
    fleet, runs = one.fleet, one.runs
    decode = WorkerRow.of(fleet.shape.decode)
    return FleetRow(
        name=str(fleet),
        accelerator=decode.accelerator,
        tp=decode.tp,
        prefill_worker=WorkerRow.of(fleet.shape.prefill) if fleet.prefill_workers else None,
        decode_worker=decode,
        mode=fleet.shape.mode,
        prefill_workers=fleet.prefill_workers,
        decode_workers=fleet.decode_workers,
        policy=fleet.policy,
        num_gpus=fleet.num_gpus,
        usd_per_hour=fleet.usd_per_hour,
        usd_per_million_good_output_tokens=one.cost,
        attainment=one.attainment,
        holds=holds,
        is_on_front=is_on_front,
        goodput_per_s=fmean(run.goodput_per_s for run in runs),
        good_output_tokens_per_s=fmean(run.good_output_tokens_per_s for run in runs),
        ttft_p50_ms=_mean(run.ttft_ms.p50 for run in runs),
        ttft_p99_ms=_mean(run.ttft_ms.p99 for run in runs),
        tpot_p50_ms=_mean(run.tpot_ms.p50 for run in runs),
        tpot_p99_ms=_mean(run.tpot_ms.p99 for run in runs),
        hit_rate=fmean(run.hit_rate for run in runs),
    )


# ---- what binds

BY_CAUSE: Final = {
    Cause.ROUTER_WAIT: Constraint.QUEUEING,
    Cause.QUEUE: Constraint.QUEUEING,
    Cause.KV_LOAD: Constraint.LINK,
    Cause.TRANSFER: Constraint.LINK,
    Cause.OWN_PREFILL: Constraint.PREFILL_COMPUTE,
    Cause.OTHERS_PREFILL: Constraint.PREFILL_COMPUTE,
    Cause.PREEMPTION: Constraint.MEMORY,
    Cause.DECODE: Constraint.DECODE_BANDWIDTH,
    Cause.DECODE_INTERFERENCE: Constraint.DECODE_BANDWIDTH,
    Cause.CLIENT_BACKPRESSURE: Constraint.NONE,
}


def binding(
    fleet: Fleet, measured: Sequence[Measured], bounds: Mapping[str, Bound], target: float
) -> Binding:
    """What breaks with a worker less; where the bound allows none less, what sets the bound."""
    least = bounds[str(fleet.shape)]
    for other in measured:
        is_less = fleet.num_workers - other.fleet.num_workers == 1
        is_alike = str(other.fleet.shape) == str(fleet.shape) and other.fleet.policy == fleet.policy
        if is_less and is_alike and not other.holds(target):
            cause = main_miss(other.misses)
            words = f"{other.fleet}: {other.attainment.mean:.1%} are good"
            if cause:
                metric, name = cause[0].upper(), cause[1].value.replace("_", " ")
                words += f"; most misses are of {metric}, by {name}"
            return Binding(constraint=constraint_of(other, least), reason=words)
    share = least.workers_needed / fleet.num_workers
    if fleet.num_workers == (2 if fleet.prefill_workers else 1):
        words = f"the load takes {share:.0%} of what it could do without queues"
        return Binding(constraint=Constraint.NONE, reason=words)
    words = f"the load needs {least.workers_needed:.2f} workers even without queues"
    return Binding(constraint=least.constraint, reason=words)


def constraint_of(one: Measured, least: Bound) -> Constraint:
    """By the causes of misses. Who queued did so for memory or for work where these were nearly
    used up, and elsewhere by chance.
    """
    fleet = one.fleet
    if (found := main_constraint(one.misses)) is not Constraint.QUEUEING:
        return found
    decode = fleet.shape.decode
    num_engines = fleet.decode_workers * decode.num_engines
    tokens = fmean(
        (run.prompt_tokens_per_s + run.output_tokens_per_s) / run.load_per_s for run in one.runs
    )
    # Little's law
    seqs = fmean(run.load_per_s * (run.e2e_ms.mean or 0.0) for run in one.runs) / 1000 / num_engines
    if seqs > NEAR_FULL * decode.seqs_that_fit(tokens):
        return Constraint.MEMORY
    is_full = least.workers_needed > NEAR_FULL * fleet.num_workers
    return least.constraint if is_full else Constraint.QUEUEING


def main_constraint(misses: Misses) -> Constraint:
    """As far as the causes of misses tell."""
    found = main_miss(misses)
    return BY_CAUSE[found[1]] if found else Constraint.QUEUEING


def main_miss(misses: Misses) -> tuple[str, Cause] | None:
    """The limit and the cause of most misses."""
    counts = {
        (metric, Cause(cause)): count
        for metric, causes in misses.items()
        for cause, count in causes.items()
    }
    return max(counts, key=counts.__getitem__, default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
