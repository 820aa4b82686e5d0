"""Tokens of which a reader is told later, with the times at which they came.

Between a sequence's first token and its end, a front end only counts: every so many tokens its
router hears of them. So their words may wait until then, where whoever measures gets the times
beside them; telling each would cost a simulation as much as computing it.
"""

from collections.abc import Sequence

from headrace.core.base.events import Emit, EngineEffect, Finish, Preempted
from headrace.core.base.types import Ns, SeqId
from headrace.core.router.front import PROGRESS_TOKENS

Run = tuple[Emit, Sequence[Ns]]
"""Tokens of one sequence, with the time of each."""


class _Held:
    __slots__ = ("num_tokens", "times_ns", "tokens")

    def __init__(self) -> None:
        self.num_tokens = 1  # since it came here, told or not: its first one is told at once
        self.tokens: list[int] = []
        self.times_ns: list[Ns] = []

    def add(self, tokens: Sequence[int], times_ns: Sequence[Ns]) -> None:
        self.tokens += tokens
        self.times_ns += times_ns
        self.num_tokens += len(tokens)

    def take(self, seq_id: SeqId, num_tokens: int) -> Run:
        """The first of what is held."""
        run = Emit(seq_id, tuple(self.tokens[:num_tokens])), self.times_ns[:num_tokens]
        del self.tokens[:num_tokens], self.times_ns[:num_tokens]
        return run


class Untold:
    """Of one engine. Sequences may be added to by an event of the engine, or by a glide."""

    def __init__(self) -> None:
        self._held: dict[SeqId, _Held] = {}

    def num_until_told(self, seq_id: SeqId) -> int:
        """Tokens after which its reader is told again, from 1 on; it has had its first one."""
        return PROGRESS_TOKENS - self._held[seq_id].num_tokens % PROGRESS_TOKENS

    def add(self, seq_id: SeqId, tokens: Sequence[int], times_ns: Sequence[Ns]) -> None:
        self._held[seq_id].add(tokens, times_ns)

    def forget(self, seq_id: SeqId) -> None:
        """It has ended, and all was told."""
        del self._held[seq_id]

    def take(self, seq_id: SeqId) -> Run:
        """All that is held of a sequence, at least one token."""
        held = self._held[seq_id]
        return held.take(seq_id, len(held.tokens))

    def take_until(self, until_ns: Ns) -> list[Run]:
        """What came no later than that, of everybody."""
        runs: list[Run] = []
        for seq_id, held in self._held.items():
            num_tokens = sum(at_ns <= until_ns for at_ns in held.times_ns)
            if num_tokens:
                runs.append(held.take(seq_id, num_tokens))
        return runs

    def filter(
        self, at_ns: Ns, effects: Sequence[EngineEffect]
    ) -> tuple[list[EngineEffect], dict[SeqId, Sequence[Ns]]]:
        """What is to be told of an event's effects now, and the times of runs among it."""
        told: list[EngineEffect] = []
        times: dict[SeqId, Sequence[Ns]] = {}
        for effect in effects:
            if isinstance(effect, Emit):
                held = self._held.get(effect.seq_id)
                if held is None:
                    self._held[effect.seq_id] = _Held()
                    told.append(effect)
                    continue
                held.tokens += effect.tokens
                held.times_ns.append(at_ns)
                held.num_tokens += 1
                if held.num_tokens % PROGRESS_TOKENS:
                    continue
            elif isinstance(effect, Finish):
                held = self._held.pop(effect.seq_id, None)
            elif isinstance(effect, Preempted):
                held = self._held.get(effect.seq_id)
            else:
                told.append(effect)
                continue
            if held is not None and held.tokens:
                emit, times[effect.seq_id] = held.take(effect.seq_id, len(held.tokens))
                told.append(emit)
            if not isinstance(effect, Emit):
                told.append(effect)
        return told, times
