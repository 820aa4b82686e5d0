"""The port between a driver and whatever computes steps."""

from collections.abc import Callable
from typing import Protocol

from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import StepPlan, WorkerSpec

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
