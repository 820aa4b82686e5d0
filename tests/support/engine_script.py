"""An engine's events and effects written by hand, for tests that need delays of known size."""

from collections.abc import Sequence

from headrace.core.base.events import (
    Admitted,
    Arrive,
    Cancel,
    Emit,
    EngineEffect,
    EngineEvent,
    Finish,
    StartStep,
    StepDone,
    StepFailed,
)
from headrace.core.base.plan import SeqStep, StepPlan, StepResult
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_MS, Ns, SeqId, StepId
from headrace.core.cost.model import StepShape
from headrace.core.telemetry import RequestRecord, Telemetry

PROMPT = 64
MS = NS_PER_MS


class LinearCost:
    """2 ms a step and 1 ms a token: round numbers to reckon with."""

    def step_ns(self, shape: StepShape) -> Ns:
        return Ns(2 * MS + MS * shape.num_tokens)

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        return Ns(1)


class Script:
    """Events and effects written by hand; times in ms."""

    def __init__(self, slo: Slo | None = None) -> None:
        self.telemetry = Telemetry(slo or Slo(), LinearCost())
        self.now_ms = 0.0
        self.records: dict[int, RequestRecord] = {}
        self._num_steps = 0
        self._num_output: dict[int, int] = {}

    def see(self, event: EngineEvent, *effects: EngineEffect) -> None:
        now = Ns(round(self.now_ms * MS))
        for record in self.telemetry.observe(now, event, effects):
            assert record.seq_id not in self.records
            self.records[record.seq_id] = record

    def wait(self, ms: float) -> None:
        self.now_ms += ms

    def arrive(self, *ids: int, ago_ms: float = 0.0, slo: Slo | None = None) -> None:
        arrived = Ns(round((self.now_ms - ago_ms) * MS))
        self.see(Arrive(tuple(spec(i, arrived, slo or Slo()) for i in ids)))

    def admit(self, seq_id: int, num_cached: int = 0) -> None:
        self.see(Cancel(SeqId(-1)), Admitted(SeqId(seq_id), num_cached))

    def step(
        self,
        *shares: tuple[int, int, int],
        ms: float | None = None,
        emits: Sequence[int] = (),
        fails: bool = False,
        then: Sequence[EngineEffect] = (),
    ) -> None:
        """One step of shares (sequence, start, tokens); as long as predicted unless `ms` says."""
        plan = StepPlan(
            StepId(self._num_steps), tuple(SeqStep(SeqId(i), s, (7,) * n, ()) for i, s, n in shares)
        )
        self._num_steps += 1
        self.see(Cancel(SeqId(-1)), StartStep(plan))
        self.now_ms += LinearCost().step_ns(StepShape.of(plan)) / MS if ms is None else ms
        effects = [Emit(SeqId(i), (7,)) for i in emits]
        for i in emits:
            self._num_output[i] = self._num_output.get(i, 0) + 1
        if fails:
            self.see(StepFailed(plan.step_id, "fault"), *effects, *then)
        else:
            self.see(StepDone(StepResult(plan.step_id, (), Ns(0))), *effects, *then)

    def finish(self, seq_id: int, reason: FinishReason = FinishReason.LENGTH) -> RequestRecord:
        num_output = self._num_output.get(seq_id, 0)
        self.see(Cancel(SeqId(-1)), Finish(SeqId(seq_id), reason, PROMPT, num_output, 0, 0))
        record = self.records[seq_id]
        assert record.time.total_ns == record.e2e_ns
        return record

    def run(self, seq_id: int, *, num_decode: int = 3) -> None:
        """Prefill in one step, then decode, undisturbed: 66 ms and 3 ms a token."""
        self.admit(seq_id)
        self.step((seq_id, 0, PROMPT), emits=[seq_id])
        for i in range(num_decode):
            self.step((seq_id, PROMPT + i, 1), emits=[seq_id])


def spec(seq_id: int, arrived: Ns, slo: Slo) -> SeqSpec:
    return SeqSpec(
        seq_id=SeqId(seq_id),
        request_id=f"r{seq_id}",
        prompt_tokens=(7,) * PROMPT,
        params=SamplingParams(),
        slo=slo,
        arrived_ns=arrived,
    )
