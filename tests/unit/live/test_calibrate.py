"""Calibration learns what an executor's steps cost, within what the executor can take."""

import threading

import pytest

from headrace.adapters.executors.port import OnStepDone
from headrace.core.base.errors import DeviceError
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import StepPlan, StepResult
from headrace.core.base.types import Ns
from headrace.core.cost.model import StepShape
from headrace.live.calibrate import calibrate
from support.live import worker_spec


class TimedExecutor:
    """Says what its steps took: 2 ms, and 50 µs a token; checks that a plan is one it can run."""

    def __init__(self, *, num_blocks: int = 4096, max_model_len: int = 1024, fails: bool = False):
        self.spec = worker_spec(num_blocks=num_blocks, max_model_len=max_model_len)
        self.fails = fails
        self.plans: list[StepPlan] = []

    def start(self, plan: StepPlan, on_done: OnStepDone) -> None:
        for seq in plan.seqs:
            assert seq.start + len(seq.tokens) <= self.spec.max_model_len
            assert len(seq.block_ids) * self.spec.block_size >= seq.start + len(seq.tokens)
            assert max(seq.block_ids) < self.spec.num_blocks
        blocks = [block for seq in plan.seqs for block in seq.block_ids]
        assert len(set(blocks)) == len(blocks)
        self.plans.append(plan)
        end: StepDone | StepFailed = StepDone(StepResult(plan.step_id, (), self.took_ns(plan)))
        if self.fails:
            end = StepFailed(plan.step_id, "no power")
        threading.Thread(target=on_done, args=(end,)).start()

    def took_ns(self, plan: StepPlan) -> Ns:
        return Ns(2_000_000 + 50_000 * plan.num_tokens)

    def close(self) -> None:
        pass


def test_the_fit_predicts_the_executor() -> None:
    executor = TimedExecutor()
    cost = calibrate(executor, step_tokens=512)
    for plan in executor.plans:
        predicted = cost.step_ns(StepShape.of(plan))
        assert predicted == pytest.approx(executor.took_ns(plan), rel=0.2)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "step_tokens"), [(1, 16, 1), (3, 48, 8), (40, 600, 64)]
)
def test_a_small_executor_is_asked_for_small_steps(
    num_blocks: int, max_model_len: int, step_tokens: int
) -> None:
    executor = TimedExecutor(num_blocks=num_blocks, max_model_len=max_model_len)
    calibrate(executor, step_tokens=step_tokens)
    assert executor.plans
    assert max(plan.num_tokens for plan in executor.plans) <= step_tokens


def test_a_failing_step_is_an_error() -> None:
    with pytest.raises(DeviceError, match="no power"):
        calibrate(TimedExecutor(fails=True), step_tokens=8)
