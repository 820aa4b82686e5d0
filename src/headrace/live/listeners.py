"""Who hears of an engine's effects: each living sequence's sink, and those who observe it all.

Decides who is told what; refuses to be hurt by a listener that fails. Belongs to the engine thread,
except for `observe`.
"""

import logging
from collections.abc import Callable, Sequence

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
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import Ns, SeqId

_log = logging.getLogger(__name__)

Sink = Callable[[EngineEffect], None]
Observer = Callable[[Ns, EngineEvent, Sequence[EngineEffect]], None]

RETRY_AFTER_S = 5.0  # what a client is told that comes while the engine drains or has failed


class Listeners:
    """`cancel` is called for a sequence whose sink has failed: nobody would hear the rest."""

    def __init__(self, cancel: Callable[[SeqId], None]) -> None:
        self._cancel = cancel
        self._sinks: dict[SeqId, Sink] = {}
        self._observers: tuple[Observer, ...] = ()

    @property
    def num_living(self) -> int:
        """Sequences that have not heard their last word."""
        return len(self._sinks)

    def living(self) -> list[SeqId]:
        return list(self._sinks)

    def observe(self, observer: Observer) -> None:
        self._observers += (observer,)

    def add(self, seqs: Sequence[SeqSpec], sink: Sink) -> None:
        for spec in seqs:
            self._sinks[spec.seq_id] = sink

    def tell(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        """Sinks first, then observers. InvariantError for a word to a sequence that has ended."""
        for effect in effects:
            match effect:
                case Admitted() | Emit() | Preempted() | Finish() | Reject():
                    self._say(effect.seq_id, effect)
                case _:
                    pass
        for observer in self._observers:
            try:
                observer(now, event, effects)
            except Exception:
                _log.exception("observer failed")

    def end_all(self, now: Ns, event: EngineEvent, error: str) -> None:
        """The last word to all that live, where the core can give none."""
        words = [
            Finish(seq_id, FinishReason.ERROR, 0, 0, 0, 0, error=error) for seq_id in self.living()
        ]
        self.tell(now, event, words)

    def _say(self, seq_id: SeqId, effect: EngineEffect) -> None:
        sink = self._sinks.get(seq_id)
        if sink is None:
            raise InvariantError("word about a sequence that has ended", effect=effect)
        if isinstance(effect, Finish | Reject):
            del self._sinks[seq_id]
        try:
            sink(effect)
        except Exception:
            _log.exception("sink of sequence %d failed; the sequence is cancelled", seq_id)
            if seq_id in self._sinks:
                self._sinks[seq_id] = _ignore
                self._cancel(seq_id)


def refusals(event: Arrive, code: str, message: str) -> list[EngineEffect]:
    """The engine's own answer to sequences that the core never sees."""
    hint = "retry elsewhere or later"
    return [Reject(spec.seq_id, 503, code, message, hint, RETRY_AFTER_S) for spec in event.seqs]


def _ignore(effect: EngineEffect) -> None:
    """The sink of a sequence whose own sink has failed."""
