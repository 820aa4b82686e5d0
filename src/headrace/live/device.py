"""An engine's executor and mover, with what runs there. Belongs to whoever has the turn."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from headrace.adapters.executors.port import Executor, OnStepDone
from headrace.adapters.movers.port import Mover
from headrace.core.base.events import (
    CopyDone,
    EngineEffect,
    EngineEvent,
    KvChanged,
    StartCopy,
    StartStep,
    StepDone,
    StepFailed,
)
from headrace.core.base.plan import StepPlan

_log = logging.getLogger(__name__)


class Device:
    """`on_step` and `on_copy` hear the ends, from other threads."""

    def __init__(
        self,
        executor: Executor,
        mover: Mover | None,
        on_step: OnStepDone,
        on_copy: Callable[[CopyDone], None],
    ) -> None:
        self._executor = executor
        self._mover = mover
        self._on_step = on_step
        self._on_copy = on_copy
        self.num_steps = 0  # that run, or are lost
        self.num_copies = 0  # that are under way
        self._num_begun = self._num_over = 0  # of all steps: those over may not be noted yet
        self._lost: deque[StepFailed] = deque()  # to be told when those before them have ended

    def carry_out(self, effects: Sequence[EngineEffect]) -> None:
        """Start what these effects ask for."""
        if self._mover is not None:
            for effect in effects:
                if isinstance(effect, KvChanged):
                    self._mover.publish(effect.changes)  # before a step may write to such a block
        for effect in effects:
            if isinstance(effect, StartStep):
                self._start_step(effect.plan)
            elif isinstance(effect, StartCopy):
                self.num_copies += 1
                if self._mover is None:
                    self._on_copy(CopyDone(effect.copy_id, 0, "no mover"))
                else:
                    self._mover.start(effect, self._on_copy)

    @property
    def is_idle(self) -> bool:
        """Whether no step runs, be the end of the last one noted or not."""
        return self._num_begun == self._num_over

    def end_step(self) -> None:
        """One has ended, and will be noted. For whoever brings the news, before that."""
        self._num_over += 1

    def note(self, event: EngineEvent) -> None:
        """An end has come."""
        if isinstance(event, StepDone | StepFailed):
            self.num_steps -= 1
        elif isinstance(event, CopyDone):
            self.num_copies -= 1

    def next_lost(self) -> StepFailed | None:
        """Steps end in their order, also those that never began: the next of these, if it is time
        for it.
        """
        if self._lost and len(self._lost) == self.num_steps:
            self._num_over += 1  # nothing runs that could end meanwhile
            return self._lost.popleft()
        return None

    def close(self) -> None:
        self._executor.close()
        if self._mover is not None:
            self._mover.close()

    def _start_step(self, plan: StepPlan) -> None:
        self.num_steps += 1
        self._num_begun += 1
        if self._lost:
            self._lost.append(StepFailed(plan.step_id, "the step before has failed"))
            return
        try:
            self._executor.start(plan, self._on_step)
        except Exception as error:
            _log.exception("executor could not start step %d", plan.step_id)
            self._lost.append(StepFailed(plan.step_id, str(error)))
