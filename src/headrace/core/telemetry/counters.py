"""Counts of everything since the start, with the identities that they keep."""

from collections import Counter
from collections.abc import Sequence

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    Admitted,
    Arrive,
    Emit,
    EngineEffect,
    EngineEvent,
    Finish,
    Preempted,
    Reject,
)
from headrace.core.base.request import FinishReason
from headrace.core.base.types import SeqId


class Counters:
    """Monotone totals, and the sequences that wait and run. Feed it every event from the first."""

    def __init__(self) -> None:
        self.num_arrived = 0
        self.num_rejected = Counter[str]()  # by code
        self.num_finished = Counter[FinishReason]()  # by reason
        self.num_first_tokens = 0  # TTFTs observed
        self.num_answered = 0  # ended with a token at least
        self.num_prompt_tokens = 0  # of sequences that ended
        self.num_cached_tokens = 0  # of these, found in the cache
        self.num_output_tokens = 0  # sent
        self.num_preemptions = 0
        self.num_lost_tokens = 0  # computed tokens given up by preemption
        self._waiting: set[SeqId] = set()
        self._running: set[SeqId] = set()
        self._num_sent: dict[SeqId, int] = {}  # tokens sent, of living sequences that have any
        self._num_brought: dict[SeqId, int] = {}  # tokens that living sequences came with

    @property
    def num_accepted(self) -> int:
        return self.num_arrived - self.num_rejected.total()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def observe(self, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        """Raises InvariantError for what no living sequence can do."""
        if isinstance(event, Arrive):
            self.num_arrived += len(event.seqs)
            self._waiting.update(spec.seq_id for spec in event.seqs)
            self._num_brought.update(
                (spec.seq_id, len(spec.output_tokens)) for spec in event.seqs if spec.output_tokens
            )
        for effect in effects:
            match effect:
                case Admitted(seq_id):
                    self._move(seq_id, self._waiting, self._running)
                case Preempted(seq_id, _, num_lost):
                    self._move(seq_id, self._running, self._waiting)
                    self.num_preemptions += 1
                    self.num_lost_tokens += num_lost
                case Emit(seq_id, tokens) if tokens:
                    self._send(seq_id, len(tokens))
                case Reject(seq_id, code=code):
                    self._waiting.discard(seq_id)
                    self._num_brought.pop(seq_id, None)
                    self.num_rejected[code] += 1
                case Finish():
                    self._finish(effect)

    def check(self) -> None:
        """Raise InvariantError unless every sequence that was accepted is in exactly one place."""
        num_finished = self.num_finished.total()
        if self.num_accepted != num_finished + self.num_running + self.num_waiting:
            raise InvariantError(
                "sequences do not add up",
                accepted=self.num_accepted,
                finished=num_finished,
                running=self.num_running,
                waiting=self.num_waiting,
            )
        if self.num_first_tokens != self.num_answered + len(self._num_sent):
            raise InvariantError(
                "first tokens do not add up",
                first_tokens=self.num_first_tokens,
                answered=self.num_answered,
                answering=len(self._num_sent),
            )

    def _move(self, seq_id: SeqId, source: set[SeqId], target: set[SeqId]) -> None:
        if seq_id not in source:
            raise InvariantError("sequence is not where it must be", seq_id=seq_id)
        source.remove(seq_id)
        target.add(seq_id)

    def _send(self, seq_id: SeqId, num_tokens: int) -> None:
        if seq_id not in self._num_sent:
            self.num_first_tokens += 1
        self._num_sent[seq_id] = self._num_sent.get(seq_id, 0) + num_tokens
        self.num_output_tokens += num_tokens

    def _finish(self, finish: Finish) -> None:
        self._waiting.discard(finish.seq_id)
        self._running.discard(finish.seq_id)
        num_sent = self._num_sent.pop(finish.seq_id, 0)
        if num_sent + self._num_brought.pop(finish.seq_id, 0) != finish.num_output_tokens:
            raise InvariantError(
                "tokens do not add up",
                seq_id=finish.seq_id,
                sent=num_sent,
                counted=finish.num_output_tokens,
            )
        self.num_answered += num_sent > 0
        self.num_finished[finish.reason] += 1
        self.num_prompt_tokens += finish.num_prompt_tokens
        self.num_cached_tokens += finish.num_cached_tokens
