"""The port between a driver and whatever computes steps."""

from collections.abc import Callable
from typing import Protocol

from headrace.core.base.plan import StepPlan, WorkerSpec
from headrace.core.engine.events import StepDone, StepFailed

OnStepDone = Callable[[StepDone | StepFailed], None]


class Executor(Protocol):
    """Runs one step at a time. `on_done` is called exactly once for each start, on any thread,
    never inside `start`.
    """

    spec: WorkerSpec

    def start(self, plan: StepPlan, on_done: OnStepDone) -> None: ...

    def close(self) -> None:
        """Finish the running step, free the device, join threads. Idempotent."""
        ...
