"""Intervals of shares, and what an event log says of steps."""

import pytest

from headrace.core.base.events import StartStep, StepDone, StepFailed
from headrace.core.base.plan import SampleSpec, SeqStep, StepPlan, StepResult
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, Ns, SeqId, StepId
from headrace.core.cost.model import StepShape
from headrace.core.engine.trace import Frame
from headrace.sim.recorded import step_samples
from headrace.sim.summary import wilson


@pytest.mark.parametrize(
    ("num_good", "num_all", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.278), (9, 10, 0.596, 0.982), (900, 1000, 0.880, 0.917)],
)
def test_the_interval_of_a_share(num_good: int, num_all: int, low: float, high: float) -> None:
    assert wilson(num_good, num_all) == pytest.approx((low, high), abs=1e-3)


def test_steps_that_ended_well_are_samples() -> None:
    plans = [
        StepPlan(
            StepId(index),
            (SeqStep(SeqId(0), 4, (1,), (BlockId(0),), SampleSpec(SamplingParams(), 5)),),
        )
        for index in range(3)
    ]
    frames = [
        Frame(Ns(0), StepFailed(StepId(9), ""), (StartStep(plans[0]), StartStep(plans[1]))),
        Frame(Ns(1), StepDone(StepResult(StepId(0), (), Ns(7))), ()),
        Frame(Ns(2), StepFailed(StepId(1), "broken"), (StartStep(plans[2]),)),
    ]
    assert list(step_samples(frames)) == [(StepShape(1, 1, 1, 5, 5), 7)]
