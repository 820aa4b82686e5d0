"""Who hears of an engine's effects: each living sequence's sink, and those who observe it all.

Decides who is told what; refuses to be hurt by a listener that fails. Belongs to the engine thread,
except for `observe`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    Admitted,
    Arrive,
    Computed,
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


@dataclass(slots=True)
class _Heard:
    """A living sequence: who hears of it, and what it has heard."""

    sink: Sink
    num_prompt_tokens: int
    num_output_tokens: int  # those that it came with included
    num_cached_tokens: int | None = None  # at first admission
    num_preemptions: int = 0

    def note(self, effect: EngineEffect) -> None:
        match effect:
            case Admitted() if self.num_cached_tokens is None:
                self.num_cached_tokens = effect.num_cached_tokens
            case Emit():
                self.num_output_tokens += len(effect.tokens)
            case Preempted():
                self.num_preemptions += 1

    def last_word(self, seq_id: SeqId, error: str) -> Finish:
        return Finish(
            seq_id=seq_id,
            reason=FinishReason.ERROR,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=self.num_preemptions,
            error=error,
        )


class Listeners:
    """`cancel` is called for a sequence whose sink has failed: nobody would hear the rest."""

    def __init__(self, cancel: Callable[[SeqId], None]) -> None:
        self._cancel = cancel
        self._living: dict[SeqId, _Heard] = {}
        self._observers: tuple[Observer, ...] = ()
        self._after_words: tuple[Callable[[], None], ...] = ()

    @property
    def num_living(self) -> int:
        """Sequences that have not heard their last word."""
        return len(self._living)

    def living(self) -> list[SeqId]:
        return list(self._living)

    def observe(self, observer: Observer) -> None:
        self._observers += (observer,)

    def add(self, seqs: Sequence[SeqSpec], sink: Sink) -> None:
        for spec in seqs:
            self._living[spec.seq_id] = _Heard(
                sink, len(spec.prompt_tokens), len(spec.output_tokens)
            )

    def after_words(self, callback: Callable[[], None]) -> None:
        """Call it when all sinks have heard what they have to hear of an event."""
        self._after_words += (callback,)

    def tell(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        """Sinks first, then observers. InvariantError for a word to a sequence that has ended."""
        self.say(effects)
        self.show(now, event, effects)

    def say(self, effects: Sequence[EngineEffect]) -> bool:
        """To sinks. Whether it was nothing but tokens."""
        is_plain = True
        for effect in effects:
            match effect:
                case Emit(seq_id):
                    self._say(seq_id, effect)
                case Admitted() | Computed() | Preempted() | Finish() | Reject():
                    is_plain = False
                    self._say(effect.seq_id, effect)
                case _:
                    pass
        for callback in self._after_words:
            try:
                callback()
            except Exception:
                _log.exception("words were not passed on")
        return is_plain

    def show(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        """To observers."""
        for observer in self._observers:
            try:
                observer(now, event, effects)
            except Exception:
                _log.exception("observer failed")

    def end(self, seq_ids: Sequence[SeqId], now: Ns, event: EngineEvent, error: str) -> None:
        """The last word to those of these that live, where the core can give none."""
        words = [
            heard.last_word(seq_id, error)
            for seq_id in seq_ids
            if (heard := self._living.get(seq_id)) is not None
        ]
        self.tell(now, event, words)

    def _say(self, seq_id: SeqId, effect: EngineEffect) -> None:
        heard = self._living.get(seq_id)
        if heard is None:
            raise InvariantError("word about a sequence that has ended", effect=effect)
        heard.note(effect)
        if isinstance(effect, Finish | Reject):
            del self._living[seq_id]
        try:
            heard.sink(effect)
        except Exception:
            _log.exception("sink of sequence %d failed; the sequence is cancelled", seq_id)
            if seq_id in self._living:
                heard.sink = _ignore
                self._cancel(seq_id)


def refusals(event: Arrive, code: str, message: str) -> list[EngineEffect]:
    """The engine's own answer to sequences that the core never sees."""
    hint = "retry elsewhere or later"
    return [Reject(spec.seq_id, 503, code, message, hint, RETRY_AFTER_S) for spec in event.seqs]


def _ignore(effect: EngineEffect) -> None:
    """The sink of a sequence whose own sink has failed."""
