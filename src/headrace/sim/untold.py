"""Tokens of which a reader is told later, with the times at which they came.

Between a sequence's first token and its end, a front end only counts: every so many tokens its
router hears of them. So their words may wait until then, where whoever measures gets the times
beside them; telling each would cost a simulation as much as computing it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from headrace.core.base.events import Emit, EngineEffect, Finish, Preempted
from headrace.core.base.types import Ns, SeqId
from headrace.core.router.front import PROGRESS_TOKENS

Run = tuple[Emit, Sequence[Ns]]
"""Tokens of one sequence, with their times and those of tokens before that were told without."""


class _Held:
    __slots__ = ("num_tokens", "times_ns", "tokens")

    def __init__(self) -> None:
        self.num_tokens = 1  # since it came here, told or not: its first one is told at once
        self.tokens: list[int] = []
        self.times_ns: list[Ns] = []  # of these, and of those before that were told without

    def take_tokens(self, seq_id: SeqId) -> Emit:
        emit = Emit(seq_id, tuple(self.tokens))
        self.tokens.clear()
        return emit


class Untold:
    """Of one engine. Sequences may be added to by an event of the engine, or by a glide.

    Tokens are told whenever the router hears of them; their times when the sequence ends, or is
    preempted, or is lost, since nobody asks before.
    """

    def __init__(self) -> None:
        self._held: dict[SeqId, _Held] = {}

    def num_until_told(self, seq_id: SeqId) -> int:
        """Tokens after which its reader is told again, from 1 on; it has had its first one."""
        return PROGRESS_TOKENS - self._held[seq_id].num_tokens % PROGRESS_TOKENS

    def add(self, seq_id: SeqId, tokens: Sequence[int], times_ns: Sequence[Ns]) -> None:
        held = self._held[seq_id]
        held.tokens += tokens
        held.times_ns += times_ns
        held.num_tokens += len(tokens)

    def take(self, seq_id: SeqId) -> Emit:
        """All tokens that are held of a sequence, at least one; their times are told later."""
        return self._held[seq_id].take_tokens(seq_id)

    def end(self, seq_id: SeqId) -> Run:
        """All that is held of a sequence that has ended."""
        held = self._held.pop(seq_id)
        return held.take_tokens(seq_id), held.times_ns

    def put_back(self, words: Sequence[EngineEffect], times: Mapping[SeqId, Sequence[Ns]]) -> None:
        """Nobody has heard these words, which were told last of all. What has no times was made
        when it was told.
        """
        for word in words:
            if isinstance(word, Emit) and word.seq_id in times:
                held = self._held.setdefault(word.seq_id, _Held())
                held.tokens[:0] = word.tokens
                held.times_ns[:0] = times[word.seq_id]

    def take_until(self, until_ns: Ns) -> list[Run]:
        """What came no later than that, of everybody."""
        runs: list[Run] = []
        for seq_id, held in self._held.items():
            tokens, times_ns = held.tokens, held.times_ns
            num_times = bisect_right(times_ns, until_ns)
            num_tokens = max(0, num_times - (len(times_ns) - len(tokens)))
            if num_times:
                runs.append((Emit(seq_id, tuple(tokens[:num_tokens])), times_ns[:num_times]))
                del tokens[:num_tokens], times_ns[:num_times]
        return runs

    def filter(
        self, at_ns: Ns, effects: Sequence[EngineEffect]
    ) -> tuple[list[EngineEffect], dict[SeqId, Sequence[Ns]]]:
        """What is to be told of an event's effects now, and the times of runs: empty for tokens
        whose times are told later.
        """
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
                if held.num_tokens % PROGRESS_TOKENS == 0:
                    times[effect.seq_id] = ()
                    told.append(held.take_tokens(effect.seq_id))
                continue
            if isinstance(effect, Finish | Preempted):
                held = self._held.get(effect.seq_id)
                if held is not None:
                    if held.tokens:
                        told.append(held.take_tokens(effect.seq_id))
                    if held.times_ns:
                        times[effect.seq_id], held.times_ns = held.times_ns, []
                    if isinstance(effect, Finish):
                        del self._held[effect.seq_id]
            told.append(effect)
        return told, times
