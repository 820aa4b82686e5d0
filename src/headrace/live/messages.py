"""What callers post to an engine, and what a LiveEngine's turn leaves to be told."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from headrace.core.base.events import Cancel, EngineEffect, EngineEvent
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import Ns, SeqId
from headrace.live.listeners import Sink


@dataclass(frozen=True, slots=True)
class Submit:
    seqs: tuple[SeqSpec, ...]
    sink: Sink


@dataclass(frozen=True, slots=True)
class Check:
    done: Future[None]


@dataclass(frozen=True, slots=True)
class Drain:
    done: Future[None]


@dataclass(frozen=True, slots=True)
class Call:
    callback: Callable[[Ns], None]


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class Turn:
    """An event and what came of it, to be told."""

    now: Ns
    event: EngineEvent
    effects: Sequence[EngineEffect]
    is_recorded: bool = True
    error: Exception | None = None  # of the core, which cannot be trusted any more
    lost: Sequence[SeqId] = ()  # that lived then: whoever comes later is refused in a later turn


CallThere: TypeAlias = Callable[[Callable[[], None]], object]
"""Has a function called on another thread, from any. RuntimeError where nobody would."""
Asked: TypeAlias = Submit | Check | Drain | Call | Close | Cancel
