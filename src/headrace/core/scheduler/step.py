"""A step in the making: who is in it so far, and how many tokens are left."""

from headrace.core.base.events import EngineEffect
from headrace.core.base.plan import BlockCopy, SeqStep
from headrace.core.base.types import SeqId


class StepDraft:
    """The tokens of a step, first for those that decode, then by lanes for prompts."""

    __slots__ = (
        "_long_left",
        "_short_left",
        "budget",
        "copies",
        "effects",
        "has_admitted",
        "has_preempted",
        "is_abandoned",
        "is_ahead",
        "num_kept",
        "num_others",
        "seqs",
    )

    def __init__(self, budget: int, *, is_ahead: bool = False, num_others: int = 0) -> None:
        """`num_others` sequences decode in it, without a share here."""
        self.budget = budget - num_others  # tokens that are left
        self.num_others = num_others
        self.seqs: dict[SeqId, SeqStep] = {}
        self.copies: list[BlockCopy] = []
        self.effects = list[EngineEffect]()
        self.is_ahead = is_ahead  # another step runs: it cannot be known who will need room
        self.is_abandoned = False  # somebody does need room, so it is planned when that is done
        self.has_admitted = False
        self.has_preempted = False
        # Blocks promised to protected sequences; None = to be counted anew.
        self.num_kept: int | None = None
        self._short_left = self._long_left = budget

    def open_lanes(self, *, num_short: int = 0, num_long: int = 0) -> None:
        """From here on each lane takes no more than this."""
        self._short_left, self._long_left = num_short, num_long

    @property
    def is_empty(self) -> bool:
        return not (self.seqs or self.num_others)

    @property
    def is_full(self) -> bool:
        """Nothing is left to any prompt."""
        return min(self.budget, max(self._short_left, self._long_left)) <= 0

    def left(self, *, is_long: bool) -> int:
        return max(0, min(self.budget, self._long_left if is_long else self._short_left))

    def num_tokens(self, seq_id: SeqId) -> int:
        """Of one sequence, so far."""
        share = self.seqs.get(seq_id)
        return len(share.tokens) if share is not None else 0

    def put(self, share: SeqStep, *, is_long: bool) -> None:
        """Put in a sequence's share, in place of the one that it had."""
        num_more = len(share.tokens) - self.num_tokens(share.seq_id)
        self.seqs[share.seq_id] = share
        self.budget -= num_more
        if is_long:
            self._long_left -= num_more
        else:
            self._short_left -= num_more

    def give_back(self, seq_id: SeqId) -> None:
        """Take a sequence's share out again, if it has one."""
        share = self.seqs.pop(seq_id, None)
        if share is not None:
            self.budget += len(share.tokens)
