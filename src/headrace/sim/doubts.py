"""What a recording says against a simulation of it: a machine that was starved, steps that no cost
model explains, and a simulation of what was recorded that comes out otherwise.

Decides when that is worth a warning; refuses to correct it.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.core.base.types import NS_PER_S
from headrace.core.cost.learned import MIN_SAMPLES
from headrace.core.telemetry import Cause
from headrace.core.workload.recording import PoolFacts, Recording
from headrace.sim.compare import Figures

MOST_LATE: Final = 0.4  # of steps' time outside the device; short steps have a fifth
MOST_ERROR: Final = 0.4  # of steps' time by which predictions are off, without sign
MOST_BIAS: Final = 0.2  # with it
MOST_WAITING: Final = 0.1  # of requests whose first token waited for the server most
MOST_GAP: Final = 0.25  # between recorded and simulated means
LEAST_GAP_MS: Final = 2.0
_NAMES: Final = {"ttft_ms_mean": "TTFT", "tpot_ms_mean": "TPOT", "e2e_ms_mean": "E2E"}
_REMEDY: Final = (
    "record on a machine with less beside the server, or name a calibrated one (--cost)"
)


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded steps of the workers of one role, beside what those before them predicted."""

    role: str
    num_steps: int
    recorded_s: float
    predicted_s: float
    error_share: float  # of the recorded time, by which predictions were off
    late_share: float  # of the recorded time, outside the device

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps of {self.role} workers: {self.recorded_s:.4g} s, predicted"
            f" {self.predicted_s:.4g} s, off by {self.error_share:.0%} without sign,"
            f" {self.late_share:.0%} of the time outside the device"
        )


class Doubts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known, whether it is worth a warning or not; and the warnings."""

    steps: tuple[StepFacts, ...]
    router_wait_share: float  # of requests whose first token waited for the server most
    warnings: tuple[str, ...]


def doubts_of(
    recording: Recording,
    recorded: Mapping[str, float | None],
    simulated: Figures | None = None,
) -> Doubts:
    """`simulated` are the figures of the recorded workers on a machine like theirs; None where
    another one is asked for.
    """
    pools = recording.pools[-1].pools if recording.pools else ()
    steps = tuple(_facts_of(pool) for pool in pools if pool.cost.times.num_steps)
    waiting = _router_wait_share(recording)
    warnings = [words for one in steps if (words := _doubt_of_steps(one))]
    if waiting > MOST_WAITING:
        warnings.append(
            f"{waiting:.0%} of the requests waited for their first token most of all until the"
            " server's own process had time for them: it was starved, and no simulation knows that"
        )
    warnings += _gaps(recorded, simulated or {})
    return Doubts(steps=steps, router_wait_share=waiting, warnings=tuple(warnings))


def _facts_of(pool: PoolFacts) -> StepFacts:
    times = pool.cost.times
    took_ns = max(1, times.took_ns)
    return StepFacts(
        role=pool.role.value,
        num_steps=times.num_steps,
        recorded_s=times.took_ns / NS_PER_S,
        predicted_s=times.predicted_ns / NS_PER_S,
        error_share=times.error_ns / took_ns,
        late_share=times.late_ns / took_ns,
    )


def _doubt_of_steps(one: StepFacts) -> str:
    if one.num_steps < MIN_SAMPLES:
        return ""
    faults = []
    if one.late_share > MOST_LATE:
        faults.append("the driver was late, as on a machine without free processors")
    bias = one.predicted_s / max(1e-9, one.recorded_s) - 1.0
    if one.error_share > MOST_ERROR or abs(bias) > MOST_BIAS:
        faults.append("the cost model does not explain them")
    return f"{one}: {'; '.join(faults)}; {_REMEDY}" if faults else ""


def _router_wait_share(recording: Recording) -> float:
    """Causes stand in the order of metrics, whose first is TTFT."""
    causes = [one.causes[0] for one in recording.requests if one.causes and one.ttft_ns is not None]
    return causes.count(Cause.ROUTER_WAIT) / max(1, len(causes))


def _gaps(recorded: Mapping[str, float | None], simulated: Mapping[str, float | None]) -> list[str]:
    found = []
    for name, words in _NAMES.items():
        was, will = recorded.get(name), simulated.get(name)
        if was is None or will is None:
            continue
        if abs(will - was) > max(MOST_GAP * was, LEAST_GAP_MS):
            share = will / max(was, 1e-9) - 1.0
            found.append(f"{words} {will:,.4g} ms where {was:,.4g} ms were recorded ({share:+.0%})")
    if not found:
        return []
    return ["what was recorded is not what its simulation says, on average: " + ", ".join(found)]
