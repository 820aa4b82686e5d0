"""The port between a driver and whatever computes steps."""

from collections.abc import Callable
from typing import Protocol

from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import StepPlan, WorkerSpec

OnStepDone = Callable[[StepDone | StepFailed], None]


class Executor(Protocol):
    """Runs steps one after another, in the order of their starts; a step may be started while the
    one before it runs. `on_done` is called exactly once for each start, in that order too, on any
    thread, never inside `start`.

    In a plan that is ahead, PENDING stands for the token that the step before has sampled for the
    same sequence. Where that step failed, so does this one.
    """

    spec: WorkerSpec

    def start(self, plan: StepPlan, on_done: OnStepDone) -> None: ...

    def close(self) -> None:
        """Finish the running step, free the device, join threads. Idempotent."""
        ...
