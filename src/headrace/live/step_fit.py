"""What an engine's steps take as its driver sees them, host and device together: for a simulation
of the same traffic.

The scheduler learns what the device takes (`core/cost/learned.py`), which is what its policies ask;
a simulation asks from which moment to which, and for the mean of steps of which some are held up:
errors count relative to an earlier fit, not to what noise made of a step.
"""

import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.core.base.events import EngineEffect, EngineEvent, StartStep, StepDone, StepFailed
from headrace.core.base.plan import StepPlan
from headrace.core.base.types import Ns, StepId
from headrace.core.cost.fitted import FittedCostModel, OnlineFit, StepTimes
from headrace.core.cost.learned import (
    DECODE_STEPS_PER_SAMPLE,
    HALF_LIFE,
    MIN_SAMPLES,
    SAMPLES_PER_FIT,
)
from headrace.core.cost.model import StepShape

NAME: Final = "fitted to recorded steps, as their driver saw them"


class StepFit:
    """An observer of one engine. `cost` may be asked for by any thread."""

    def __init__(self, first: FittedCostModel) -> None:
        self._first = first
        self._lock = threading.Lock()  # over the fit
        self._fit = OnlineFit(prior=first, half_life=HALF_LIFE)
        self._scale = first  # an earlier fit
        self._next_scale_at = MIN_SAMPLES
        self._times = StepTimes()  # under the lock, too
        self._started: dict[StepId, tuple[StepPlan, Ns]] = {}
        self._ended_ns = Ns(0)  # the last step

    def observe(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        match event:
            case StepDone(result):
                self._end(now, result.step_id, result.elapsed_ns)
            case StepFailed(step_id):
                self._end(now, step_id, None)
        for effect in effects:
            if isinstance(effect, StartStep):
                self._started[effect.plan.step_id] = effect.plan, now

    def cost(self) -> FittedCostModel:
        """The best that is known; what it began with, until there are enough steps."""
        with self._lock:
            if self._fit.num_samples < MIN_SAMPLES:
                return self._first
            return msgspec.structs.replace(self._fit.fit(NAME), times=self._times)

    def _end(self, now: Ns, step_id: StepId, device_ns: Ns | None) -> None:
        plan, started_ns = self._started.pop(step_id, (None, now))
        began_ns, self._ended_ns = max(started_ns, self._ended_ns), now
        if plan is not None and device_ns is not None:
            self._learn(plan, Ns(now - began_ns), device_ns)

    def _learn(self, plan: StepPlan, elapsed_ns: Ns, device_ns: Ns) -> None:
        is_like_others = len(plan.seqs) == plan.num_tokens and self._fit.num_samples > MIN_SAMPLES
        if not is_like_others or plan.step_id % DECODE_STEPS_PER_SAMPLE == 0:
            shape = StepShape.of(plan)
            predicted_ns = self._scale.step_ns(shape)
            with self._lock:
                if self._scale is not self._first:
                    self._times += StepTimes(
                        num_steps=1,
                        took_ns=elapsed_ns,
                        predicted_ns=predicted_ns,
                        error_ns=abs(predicted_ns - elapsed_ns),
                        late_ns=max(0, elapsed_ns - device_ns),
                    )
                self._fit.add(shape, elapsed_ns, predicted_ns)
                if self._fit.num_samples >= self._next_scale_at:
                    self._scale = self._fit.fit(NAME)
                    self._next_scale_at = self._fit.num_samples + SAMPLES_PER_FIT
