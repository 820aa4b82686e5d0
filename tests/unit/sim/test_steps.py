"""Uneven steps take what was measured of others, in runs, and on average what is predicted."""

from statistics import fmean

import pytest

from headrace.core.base.types import StepId
from headrace.core.cost.calibration import Residuals
from headrace.core.cost.model import StepShape
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import CHAT
from headrace.core.workload.synthetic import Synthetic, SyntheticSource
from headrace.sim.cluster import ClusterReport, simulate_cluster
from headrace.sim.setup import Device, Layout, build_cluster
from headrace.sim.steps import Uneven
from support.calibrations import calibration_of

DECODE, MIXED = StepShape(4, 4, 4, 400, 400), StepShape(40, 4, 4, 4000, 400)
RUNS = (0.5, 0.5, 0.75, 0.75, 1.5, 2.0, 1.0, 1.0)  # runs of two; a mean of 1


def test_neighbours_come_from_one_run_and_the_mean_is_kept() -> None:
    uneven = Uneven(Residuals(run_steps=2, decode=RUNS), "a")
    factors = [uneven.factor(StepId(step), DECODE) for step in range(4000)]
    pairs = set(zip(factors[::2], factors[1::2], strict=True))
    assert pairs == {(0.5, 0.5), (0.75, 0.75), (1.5, 2.0), (1.0, 1.0)}
    assert fmean(factors) == pytest.approx(1.0, abs=0.03)
    # Nothing was measured of these.
    assert uneven.factor(StepId(1), MIXED) == 1.0


def test_a_step_is_as_uneven_whenever_it_is_asked_and_seeds_differ() -> None:
    def factors(seed: str, steps: list[int]) -> list[float]:
        uneven = Uneven(Residuals(run_steps=2, decode=RUNS), seed)
        return [uneven.factor(StepId(step), DECODE) for step in steps]

    steps = list(range(100))
    assert factors("a", steps) == factors("a", steps[::-1])[::-1]
    assert factors("a", steps) != factors("b", steps)


def served(residuals: Residuals, seed: int) -> ClusterReport:
    machine = calibration_of(residuals=residuals)
    workload = Synthetic(
        profile=CHAT,
        arrivals=Arrivals.steady(1.0),
        num_requests=40,
        max_tokens=machine.spec.max_model_len,
        vocab_size=1000,
    )
    device = Device.of_calibration(machine)
    source = SyntheticSource(workload)
    return simulate_cluster(build_cluster(device, Layout(mixed=2), source, seed=seed))


def test_a_calibrated_machine_has_the_steps_that_were_measured() -> None:
    residuals = Residuals(run_steps=2, decode=RUNS, mixed=RUNS)
    first, again, other = (served(residuals, seed) for seed in (1, 1, 2))
    assert first.trace_hash == again.trace_hash != other.trace_hash
    even = [served(Residuals(), seed).trace_hash for seed in (1, 2)]
    assert even[0] == even[1] != first.trace_hash
