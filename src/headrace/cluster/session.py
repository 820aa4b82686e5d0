"""One front end, as long as its stream lasts, at a worker that may have others.

Decides which of the engine's words are for it, and what becomes of its sequences when it is gone;
refuses to touch those of others.
"""

import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from headrace.cluster import wire
from headrace.cluster.canary_answer import CanaryAnswer
from headrace.cluster.wire import Canaried, Canary, Turn, Word
from headrace.cluster.worker_line import WorkerLine
from headrace.core.base.events import (
    Admitted,
    Cancel,
    Computed,
    Emit,
    EndLease,
    EngineEffect,
    Expect,
    Finish,
    KvChange,
    Preempted,
    Reject,
)
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import Ns, SeqId
from headrace.core.engine.scope import Scope
from headrace.core.router.events import WorkerLoad
from headrace.core.telemetry import RequestRecord
from headrace.live.engine import LiveEngine
from headrace.live.step_fit import StepFit

COST_EVERY_BEATS = 20  # a worker whose steps are recorded says what they take
LOAD_EVERY_NS = Ns(10_000_000)  # how often a turn tells the load, at most


class Session:
    """`submit`, `cancel`, `end_lease`, `expect`, `tell_computed`, `answer` and `end` are called by
    whoever receives, `beat` by anybody, the rest on the engine's thread.
    """

    def __init__(self, line: WorkerLine, engine: LiveEngine, step_fit: StepFit | None) -> None:
        self.line = line
        self.is_joined = False  # it has been told what the worker serves with
        self._engine = engine
        self._step_fit = step_fit
        self._num_beats = 0
        self._scope = Scope()
        self._words: list[Word] = []
        self._ended: dict[SeqId, SeqId] = {}  # outer ids by inner ones, of this turn
        self._num_received = 0  # requests that the engine knows of
        self._load_told_ns = Ns(0)
        self._canaries: set[int] = set()  # that are not answered

    # ---- the front end's words

    def submit(self, seqs: Sequence[SeqSpec], sent_ns: Ns) -> None:
        if not seqs:
            return
        shift = time.monotonic_ns() - sent_ns
        ids = self._engine.next_seq_ids(len(seqs))
        inward = self._scope.enter([shifted(spec, shift) for spec in seqs], ids)
        self._engine.submit(inward, self._hear)

    def cancel(self, message: Cancel) -> None:
        inner = self._scope.inner(message.seq_id)
        if inner is not None:
            self._engine.cancel(inner, message.reason)

    def end_lease(self, message: EndLease) -> None:
        inner = self._scope.end_lease(message.seq_id)
        if inner is not None:
            self._engine.end_lease(inner)

    def expect(self, message: Expect) -> None:
        (number,) = self._engine.next_seq_ids(1)
        inner = self._scope.expect(message.seq_id, number)
        self._engine.expect(msgspec.structs.replace(message, seq_id=inner))

    def tell_computed(self, message: Computed) -> None:
        inner = self._scope.expected(message.seq_id)
        if inner is not None:
            self._engine.expect(msgspec.structs.replace(message, seq_id=inner))

    def answer(self, asked: Canary) -> None:
        self._canaries.add(asked.canary_id)
        CanaryAnswer(asked, self._tell_canary).begin(self._engine)

    def end(self) -> None:
        """The front end is gone: nobody waits for what it has asked, nor will copy it."""
        for inner in self._scope.living():
            self._engine.cancel(inner)
        for inner in self._scope.held():
            self._engine.end_lease(inner)

    def beat(self) -> None:
        """Say that the worker lives, and how it is once it serves."""
        if not self.is_joined:
            self.line.send(wire.Beat())
            return
        cost = None
        if self._step_fit is not None and self._num_beats % COST_EVERY_BEATS == 0:
            cost = self._step_fit.cost()
        self._num_beats += 1
        stats = self._engine.stats()
        if self._canaries:  # which nobody waits for
            num_running = max(0, stats.num_running - len(self._canaries))
            stats = msgspec.structs.replace(stats, num_running=num_running)
        self.line.send(wire.Beat(stats, self._num_received, cost))

    # ---- the engine's words

    def _hear(self, effect: EngineEffect) -> None:
        if isinstance(effect, Admitted | Computed | Emit | Preempted | Finish | Reject):
            word = self._scope.outward(effect)
            if word is None:
                return
            if isinstance(word, Finish | Reject):
                self._ended[effect.seq_id] = word.seq_id
            self._words.append(word)

    def _tell_canary(self, answer: Canaried) -> None:
        self._canaries.discard(answer.canary_id)
        with suppress(OSError):  # whoever receives finds out
            self.line.send(answer)

    def note_arrival(self, first: SeqId) -> None:
        self._num_received += self._scope.has_come(first)

    def turn(
        self,
        now: Ns,
        records: Sequence[RequestRecord],
        kv_no: int,
        changes: tuple[KvChange, ...],
    ) -> Turn | None:
        """What one event of the engine means to this front end; None = nothing."""
        ended, self._ended = self._ended, {}
        words, self._words = tuple(self._words), []
        if not (words or changes):
            return None
        return Turn(
            words=words,
            records=tuple(
                msgspec.structs.replace(record, seq_id=ended[record.seq_id])
                for record in records
                if record.seq_id in ended
            ),
            kv_no=kv_no,
            kv=changes,
            load=self._load(now),
            num_received=self._num_received,
        )

    def _load(self, now: Ns) -> WorkerLoad | None:
        if now - self._load_told_ns < LOAD_EVERY_NS:
            return None
        self._load_told_ns = now
        stats = self._engine.stats()
        return WorkerLoad.of(stats, stats.full_step_ns)


def shifted(spec: SeqSpec, shift_ns: int) -> SeqSpec:
    """The same with its times on this process's clock."""
    deadline = None if spec.deadline_ns is None else Ns(spec.deadline_ns + shift_ns)
    return msgspec.structs.replace(
        spec, arrived_ns=Ns(spec.arrived_ns + shift_ns), deadline_ns=deadline
    )
