"""Telemetry: the fold of an engine's events and effects into a record of each sequence that ends.

It decides where a sequence's time went; it refuses to know a clock, a metrics library or a server.
Memory is bounded by the sequences that live; the work is O(1) for each token.
"""

from collections import deque
from collections.abc import Sequence
from typing import assert_never

from headrace.core.base.events import (
    Admitted,
    Arrive,
    CallAt,
    Computed,
    CopyDone,
    Emit,
    EngineEffect,
    EngineEvent,
    Finish,
    KvChanged,
    Preempted,
    Reject,
    StartCopy,
    StartStep,
    StepDone,
    StepFailed,
)
from headrace.core.base.plan import SeqStep, StepPlan
from headrace.core.base.request import Slo
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.telemetry.life import Life
from headrace.core.telemetry.record import RequestRecord
from headrace.core.telemetry.steps import RunningStep, Share, StepLedger


class Telemetry:
    """Feed it every event with its effects, in order. Sequences that arrived before the first event
    it saw are known as others in a step, and get no record.

    `cost` may be replaced between events, by a better fit.
    """

    def __init__(self, default_slo: Slo, cost: CostModel) -> None:
        self.cost = cost
        self._default_slo = default_slo
        self._lives: dict[SeqId, Life] = {}
        self._copies: dict[int, StartCopy] = {}  # for sequences that are here, or expected
        self._ledger = StepLedger()
        self._step: RunningStep | None = None
        self._ahead: deque[StepPlan] = deque()  # started, but not before that one has ended

    @property
    def num_live(self) -> int:
        return len(self._lives)

    def knows(self, seq_id: SeqId) -> bool:
        """Whether the sequence has arrived and not ended."""
        return seq_id in self._lives

    def observe(
        self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]
    ) -> list[RequestRecord]:
        """Records of the sequences that ended with these effects, in order."""
        match event:
            case Arrive(seqs):
                for spec in seqs:
                    slo = merge_slo(spec.slo, self._default_slo)
                    life = self._lives[spec.seq_id] = Life(spec, slo, now, self._ledger)
                    for copy in self._copies.values():
                        if copy.seq_id == spec.seq_id:
                            life.start_copy(now, copy.copy_id, is_handoff=copy.is_handoff)
            case StepDone(result):
                self._end_step(now, result.step_id, is_lost=False)
            case StepFailed(step_id):
                self._end_step(now, step_id, is_lost=True)
            case CopyDone(copy_id):
                begun = self._copies.pop(copy_id, None)
                if begun is not None and begun.seq_id is not None:
                    ended = self._lives.get(begun.seq_id)
                    if ended is not None:
                        ended.end_copy(now, copy_id)
        records: list[RequestRecord] = []
        for effect in effects:
            self._apply(now, effect, records)
        if self._step is None and self._ahead:
            self._start_step(now, self._ahead.popleft())
        return records

    def _apply(self, now: Ns, effect: EngineEffect, records: list[RequestRecord]) -> None:
        if isinstance(effect, StartStep):
            self._ahead.append(effect.plan)
            return
        if isinstance(effect, (CallAt, KvChanged, Computed)) or effect.seq_id is None:
            return
        if isinstance(effect, StartCopy):
            self._copies[effect.copy_id] = effect
        life = self._lives.get(effect.seq_id)
        if life is None:
            return
        match effect:
            case Emit():
                if effect.tokens:
                    life.emit(now, len(effect.tokens))
            case Admitted():
                life.admit(now, effect.num_cached_tokens)
            case Preempted():
                life.preempt(now, effect.num_lost_tokens)
            case StartCopy(copy_id=copy_id):
                life.start_copy(now, copy_id, is_handoff=effect.is_handoff)
            case Finish():
                del self._lives[effect.seq_id]
                records.append(life.record(now, effect))
            case Reject():
                del self._lives[effect.seq_id]
            case _:
                assert_never(effect)

    # ---- steps

    def _start_step(self, now: Ns, plan: StepPlan) -> None:
        shares = {seq.seq_id: self._share(seq) for seq in plan.seqs}
        for seq_id in shares:
            life = self._lives.get(seq_id)
            if life is not None:
                life.start_step(now)
        self._run(RunningStep(plan.step_id, now, shares, StepShape.of(plan), self.cost))

    def _run(self, step: RunningStep) -> None:
        self._step = step
        self._ledger.start(step)

    def _share(self, seq: SeqStep) -> Share:
        life = self._lives.get(seq.seq_id)
        if life is not None:
            return Share(seq, life.num_prompt, life.regain)
        return Share(seq, 0 if len(seq.tokens) == 1 else seq.start + 1, 0)

    def _end_step(self, now: Ns, step_id: StepId, *, is_lost: bool) -> None:
        step = self._step
        if step is None or step.step_id != step_id:
            return
        self._step = None
        self._ledger.end(now)
        elapsed_ns = now - step.started_ns
        for seq_id, share in step.shares.items():
            life = self._lives.get(seq_id)
            if life is None:
                continue
            if is_lost:
                life.lose_step(now)
            else:
                life.pass_step(now, share, step.split(share, elapsed_ns))


def merge_slo(stated: Slo, default: Slo) -> Slo:
    """The stated limits, and the default ones where none is stated."""
    return Slo(
        *(
            limit if limit is not None else other
            for limit, other in zip(_limits(stated), _limits(default), strict=True)
        )
    )


def _limits(slo: Slo) -> tuple[float | None, ...]:
    return slo.ttft_ms, slo.itl_ms, slo.tpot_ms, slo.e2e_ms
