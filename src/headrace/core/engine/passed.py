"""What a glide's steps have of prompts, and what comes of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.core.base.events import EngineEffect, KvChange
from headrace.core.base.plan import BlockCopy, SeqStep
from headrace.core.base.types import SeqId
from headrace.core.engine.plain import Decoding

Tokens = Callable[[SeqId, int, int], Sequence[int]]
"""The tokens that a sequence will have at the positions from the second argument to the third."""
Changes = tuple[KvChange, ...]


class Prompts(NamedTuple):
    """What a step computes of prompts."""

    shares: tuple[SeqStep, ...]
    copies: tuple[BlockCopy, ...]

    @property
    def only_decodes(self) -> bool:
        """As the engine sees it: one token each."""
        return all(len(share.tokens) == 1 for share in self.shares)


class Passed(NamedTuple):
    """What came of a step that was looked at."""

    decoded: list[tuple[Decoding, EngineEffect]]  # those that have ended, with the last words
    effects: list[EngineEffect]  # for those whose prompts were computed, and of the next plans
    joined: list[Decoding]
    changes: Changes
    is_over: bool  # the engine is where it would be, and goes on by itself
