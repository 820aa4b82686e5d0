"""What steps take on cores that several workers share, fitted to recorded times.

A step's *work* is the time that it would take alone; while k workers are in a step, each gets on
with 1 / slow_down[k - 1] of its speed. Both are fitted in turns: the work from times and speeds,
the speeds from times and work. Large steps have speeds of their own: alone they keep all cores
busy, where small ones leave some to others.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Final

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.base.metrics import percentile
from headrace.core.base.types import Ns
from headrace.core.cost.calibration import (
    LARGE_STEP_TOKENS,
    MAX_RESIDUALS,
    HeldOut,
    Residuals,
    SeenShapes,
)
from headrace.core.cost.fitted import FittedCostModel, OnlineFit
from headrace.core.cost.least_squares import NormalEquations
from headrace.core.cost.model import StepShape

MIN_STEPS: Final = 50  # below, a fit says little
HELD_OUT: Final = 5  # one step in so many tells how far the fit is off
NUM_TURNS: Final = 10
# Share of the time that k workers must be busy at once for their speed to be taken as measured.
MIN_SHARE: Final = 0.01
MIN_OWN_SHARE: Final = 0.05  # the same, for that of steps of one size
RUN_STEPS: Final = 8  # over which neighbours' residuals are alike
MIN_RESIDUALS: Final = 4 * RUN_STEPS  # fewer say nothing of how times vary


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step as its driver saw it, from the event that let it begin to the one that ended it."""

    worker: int
    begin_ns: Ns
    end_ns: Ns
    device_ns: Ns  # of that, in the executor
    shape: StepShape


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """What recorded steps come to."""

    cost: FittedCostModel
    slow_down: tuple[float, ...]  # by how many workers are in a step; the first is 1
    slow_down_large: tuple[float, ...]  # of large steps
    residuals: Residuals
    host_share: float  # of steps' time outside the executor
    seen: SeenShapes
    held_out: HeldOut


def fit_steps(steps: Sequence[TimedStep], name: str = "calibrated") -> StepFit:
    """The fit to all steps, and how far one without every fifth of them is off at those. Raises
    ConfigError where there are too few.
    """
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"there are {len(steps)} steps, and a fit needs {MIN_STEPS}",
            hint="record more of the engine's work",
        )
    timed = [
        (step.shape, times)
        for step, times in zip(steps, times_by_company(steps), strict=True)
        if sum(times) > 0
    ]
    taught = [one for place, one in enumerate(timed) if place % HELD_OUT]
    held_out = _errors(timed[::HELD_OUT], *_fit(taught, name))
    cost, speeds = _fit(timed, name)
    small, large = speeds
    whole_ns = sum(step.end_ns - step.begin_ns for step in steps)
    device_ns = sum(step.device_ns for step in steps)
    return StepFit(
        cost=cost,
        slow_down=tuple(1.0 / speed for speed in small),
        slow_down_large=tuple(1.0 / speed for speed in large),
        residuals=_residuals(timed, cost, speeds),
        host_share=max(0.0, 1.0 - device_ns / max(1, whole_ns)),
        seen=SeenShapes(reduce(StepShape.or_more, (step.shape for step in steps)), len(small)),
        held_out=held_out,
    )


def slowness(
    steps: Sequence[TimedStep],
    cost: FittedCostModel,
    slow_down: Sequence[float],
    slow_down_large: Sequence[float] = (),
) -> float:
    """How many times as long as it says they took, all together."""
    large = slow_down_large or slow_down
    speeds = [1.0 / one for one in slow_down], [1.0 / one for one in large]
    # Workers that were in no step are no company.
    unseen = [0.0] * len(slow_down)
    work_ns = sum(
        _work_ns(step.shape, [*times, *unseen], speeds)
        for step, times in zip(steps, times_by_company(steps), strict=True)
    )
    return work_ns / max(1, sum(cost.step_ns(step.shape) for step in steps))


def times_by_company(steps: Sequence[TimedStep]) -> list[list[float]]:
    """Of each step, the time that 1, 2, 3 … workers were in a step, its own among them."""
    num_workers = len({step.worker for step in steps})
    times = [[0.0] * num_workers for _ in steps]
    # Ends before begins of the same moment, or a worker would be its own company.
    moments = sorted(
        [(step.end_ns, 0, place) for place, step in enumerate(steps)]
        + [(step.begin_ns, 1, place) for place, step in enumerate(steps)]
    )
    active: set[int] = set()
    last_ns = 0
    for at_ns, is_begin, place in moments:
        for one in active:
            times[one][min(len(active), num_workers) - 1] += at_ns - last_ns
        last_ns = at_ns
        if is_begin:
            active.add(place)
        else:
            active.discard(place)
    return times


_Timed = tuple[StepShape, list[float]]
_Speeds = tuple[list[float], list[float]]
"""Of small steps and of large ones: by how many workers are in a step, relative to one alone."""


def _is_large(shape: StepShape) -> bool:
    return shape.num_tokens >= LARGE_STEP_TOKENS


def _fit(timed: Sequence[_Timed], name: str) -> tuple[FittedCostModel, _Speeds]:
    num_seen = _num_seen([times for _, times in timed])
    speeds = [1.0] * num_seen, [1.0] * num_seen
    cost = _fit_work(timed, speeds, name)
    for _ in range(NUM_TURNS if num_seen > 1 else 0):
        speeds = _fit_speeds(timed, cost, num_seen)
        cost = _fit_work(timed, speeds, name)
    return cost, speeds


def _fit_speeds(timed: Sequence[_Timed], cost: FittedCostModel, num_seen: int) -> _Speeds:
    equations = [NormalEquations(num_seen) for _ in range(3)]  # small, large, both
    times_apart = [0.0] * num_seen, [0.0] * num_seen
    for shape, times in timed:
        merged, work_ns = _merged(times, num_seen), float(cost.step_ns(shape))
        sums = times_apart[_is_large(shape)]
        for place, time in enumerate(merged):
            sums[place] += time
        equations[_is_large(shape)].add(merged, work_ns)
        equations[2].add(merged, work_ns)
    joint = _relative(equations[2].solve([1.0] * num_seen))

    def own(is_large: bool) -> list[float]:
        """Where such steps hardly had some company, its speed is that of all."""
        sums = times_apart[is_large]
        is_known = [time > MIN_OWN_SHARE * sum(sums) for time in sums]
        if not is_known[0]:
            return joint
        found = zip(_relative(equations[is_large].solve(joint)), joint, is_known, strict=True)
        return [speed if known else usual for speed, usual, known in found]

    return own(False), own(True)


def _relative(speeds: Sequence[float]) -> list[float]:
    """Which speed is called 1 is a convention: that of a worker alone."""
    return [max(1e-3, speed / max(speeds[0], 1e-3)) for speed in speeds]


def _fit_work(timed: Sequence[_Timed], speeds: _Speeds, name: str) -> FittedCostModel:
    """Errors count relative to what a first fit predicts, not to what noise made of a step: steps
    that were held up weigh as much as those that were not, and the mean is true.
    """
    samples = [(shape, Ns(max(1, round(_work_ns(shape, times, speeds))))) for shape, times in timed]
    first = FittedCostModel.fit(samples, name=name)
    again = OnlineFit()
    for shape, work_ns in samples:
        again.add(shape, work_ns, first.step_ns(shape))
    return again.fit(name)


def _residuals(timed: Sequence[_Timed], cost: FittedCostModel, speeds: _Speeds) -> Residuals:
    """Of steps in the order of their workers and times, so that neighbours are neighbours."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for shape, times in timed:
        ratio = _work_ns(shape, times, speeds) / cost.step_ns(shape)
        found[shape.num_tokens > shape.num_seqs].append(min(1000.0, max(0.002, ratio)))
    decode, mixed = map(_some_runs, (found[False], found[True]))
    return Residuals(run_steps=RUN_STEPS, decode=decode, mixed=mixed)


def _some_runs(ratios: Sequence[float]) -> tuple[float, ...]:
    """Whole runs from all over, no more than a file may have, with a mean of 1."""
    if len(ratios) < MIN_RESIDUALS:
        return ()
    begins = range(0, len(ratios) - RUN_STEPS + 1, RUN_STEPS)
    stride = -(-len(begins) * RUN_STEPS // MAX_RESIDUALS)
    kept = [ratio for begin in begins[::stride] for ratio in ratios[begin : begin + RUN_STEPS]]
    mean = sum(kept) / len(kept)
    return tuple(round(ratio / mean, 4) for ratio in kept)


def _work_ns(shape: StepShape, times: Sequence[float], speeds: _Speeds) -> float:
    own = speeds[_is_large(shape)]
    merged = _merged(times, len(own))
    return sum(time * speed for time, speed in zip(merged, own, strict=True))


def _merged(times: Sequence[float], num_seen: int) -> list[float]:
    """What hardly ever happened counts as the company below it."""
    return [*times[: num_seen - 1], sum(times[num_seen - 1 :])]


def _num_seen(all_times: Sequence[Sequence[float]]) -> int:
    sums = [sum(column) for column in zip(*all_times, strict=True)]
    total = sum(sums)
    return max((k for k, time in enumerate(sums, 1) if time >= MIN_SHARE * total), default=1)


def _errors(timed: Sequence[_Timed], cost: FittedCostModel, speeds: _Speeds) -> HeldOut:
    """Of the time that steps are said to take in the company that they had."""
    whole = said = 0.0
    errors = []
    for shape, times in timed:
        actual = sum(times)
        predicted = cost.step_ns(shape) * actual / max(1.0, _work_ns(shape, times, speeds))
        errors.append(abs(predicted / actual - 1.0))
        whole += actual
        said += predicted
    errors.sort()
    return HeldOut(
        num_steps=len(errors),
        mean=sum(errors) / len(errors),
        p50=percentile(errors, 0.5),
        p95=percentile(errors, 0.95),
        bias=said / whole - 1.0,
    )
