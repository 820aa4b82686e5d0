"""An executor without a device: steps take as long as a cost model says, or as they once took.

It has no clock of its own. `call_later(delay_ns, call)` may be a simulator's event heap or a real
timer, so the same executor serves simulations, tests of the live driver, and dry runs of a server.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from headrace.adapters.executors.port import OnStepDone
from headrace.core.base.errors import DeviceError
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import (
    SampleSpec,
    SeqResult,
    SeqStep,
    StepPlan,
    StepResult,
    TokenLogprob,
    WorkerSpec,
)
from headrace.core.base.types import Ns, StepId
from headrace.core.cost.model import CostModel, StepShape

CallLater = Callable[[Ns, Callable[[], None]], None]
StepOutcome = tuple[StepDone | StepFailed, Ns]


class StepSource(Protocol):
    """Where a simulated executor's results come from."""

    def outcome(self, plan: StepPlan) -> StepOutcome:
        """What the step ends with, and how long that takes."""
        ...

    def lost(self, plan: StepPlan) -> StepOutcome:
        """The same for a step that was planned ahead of one that has failed."""
        ...


class SimExecutor:
    """The executor port over a StepSource."""

    def __init__(self, spec: WorkerSpec, steps: StepSource, call_later: CallLater) -> None:
        self.spec = spec
        self._steps = steps
        self._call_later = call_later
        self._lock = threading.Lock()
        # What was started and not reported; the first one runs.
        self._started: deque[tuple[StepPlan, OnStepDone]] = deque()
        # Its end: at most one. Popping it decides who reports the step: the timer or close().
        self._ends: deque[StepDone | StepFailed] = deque()
        self._has_failed = False  # the last step that was reported
        self._is_closed = False

    def start(self, plan: StepPlan, on_done: OnStepDone) -> None:
        with self._lock:
            if self._is_closed or len(self._started) > 1:
                reason = "executor is closed" if self._is_closed else "two steps run already"
                raise DeviceError(reason, step_id=plan.step_id)
            self._started.append((plan, on_done))
            if len(self._started) == 1:
                self._begin(plan)

    def _begin(self, plan: StepPlan) -> None:
        try:
            end, delay_ns = self._outcome(plan)
        except DeviceError as error:
            end, delay_ns = StepFailed(plan.step_id, str(error)), Ns(0)
        self._ends.append(end)
        if not self._is_closed:
            self._call_later(delay_ns, self._report)

    def _outcome(self, plan: StepPlan) -> StepOutcome:
        is_lost = plan.is_ahead and self._has_failed
        return self._steps.lost(plan) if is_lost else self._steps.outcome(plan)

    def close(self) -> None:
        """Steps that still run end at once: there is no device to wait for."""
        self._is_closed = True
        while self._ends:
            self._report()

    def _report(self) -> None:
        with self._lock:
            if not self._ends:
                return
            end = self._ends.popleft()
            _, on_done = self._started.popleft()
            self._has_failed = isinstance(end, StepFailed)
            if self._started:
                self._begin(self._started[0][0])
        on_done(end)


def lost_step(plan: StepPlan) -> StepOutcome:
    return StepFailed(plan.step_id, "the step before has failed"), Ns(0)


class FakeSteps:
    """Results made up from (seed, sequence, position), so that no schedule changes them; durations
    from a cost model.

    A share `failure_rate` of the steps fails, chosen by (seed, step).
    """

    def __init__(
        self, cost: CostModel, vocab_size: int, *, seed: int = 0, failure_rate: float = 0.0
    ) -> None:
        self._cost = cost
        self._vocab_size = vocab_size
        self._seed = seed
        self._failure_rate = failure_rate

    def outcome(self, plan: StepPlan) -> StepOutcome:
        elapsed_ns = self._cost.step_ns(StepShape.of(plan))
        if _mix(self._seed, plan.step_id, 1) < self._failure_rate * 2**64:
            return StepFailed(plan.step_id, "simulated fault"), elapsed_ns
        seqs = tuple(self._result(seq) for seq in plan.seqs)
        return StepDone(StepResult(plan.step_id, seqs, elapsed_ns)), elapsed_ns

    def lost(self, plan: StepPlan) -> StepOutcome:
        return lost_step(plan)

    def _result(self, seq: SeqStep) -> SeqResult:
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if seq.prompt_logprobs is not None:
            following = seq.tokens[1:] + (
                () if seq.next_prompt_token is None else (seq.next_prompt_token,)
            )
            first = seq.start + 1
            prompt_logprobs = tuple(
                self._logprob(seq, first + i, token, seq.prompt_logprobs)
                for i, token in enumerate(following)
            )
        if seq.sample is None:
            return SeqResult(seq.seq_id, prompt_logprobs=prompt_logprobs)
        token = self._token(seq, seq.sample)
        num_top = seq.sample.params.logprobs
        logprobs = (
            () if num_top is None else (self._logprob(seq, seq.sample.position, token, num_top),)
        )
        return SeqResult(seq.seq_id, (token,), logprobs, prompt_logprobs)

    def _token(self, seq: SeqStep, sample: SampleSpec) -> int:
        token = _mix(self._seed, seq.seq_id, sample.position, sample.params.seed) % self._vocab_size
        for _ in range(self._vocab_size):
            if token not in sample.banned:
                break
            token = (token + 1) % self._vocab_size
        return token

    def _logprob(self, seq: SeqStep, position: int, token: int, num_top: int) -> TokenLogprob:
        """The token as the likeliest of all, its successors by id behind it."""
        best = -(1 + _mix(self._seed, seq.seq_id, position, 2) % 1000) / 1000
        num_top = min(num_top, self._vocab_size)
        top = tuple(((token + i) % self._vocab_size, best - i) for i in range(num_top))
        return TokenLogprob(token, best, 0, top)


class RecordedSteps:
    """Results and durations of steps that once ran, by step id; what was not recorded cannot be
    run.
    """

    def __init__(self, outcomes: Mapping[StepId, StepOutcome]) -> None:
        self._outcomes = outcomes

    def outcome(self, plan: StepPlan) -> StepOutcome:
        end, delay_ns = self._outcomes.get(plan.step_id, (None, Ns(0)))
        if isinstance(end, StepDone):
            recorded = [seq.seq_id for seq in end.result.seqs]
            if recorded != [seq.seq_id for seq in plan.seqs]:
                end = None
        if end is None:
            raise DeviceError("step was not recorded like this", step_id=plan.step_id)
        return end, delay_ns

    def lost(self, plan: StepPlan) -> StepOutcome:
        return self.outcome(plan)


def _mix(*values: int) -> int:
    """64 well mixed bits of some integers (the finaliser of SplitMix64, chained)."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


_MASK = 2**64 - 1
