"""The port behind which places are handed out, and the words that cross it.

A placer begins lives and ends them. What a worker then says goes to the front end's door, and never
through the placer.
"""

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import msgspec

from headrace.core.base.worker import Role

MAX_ORDER_BYTES: Final = 1 << 16
GONE, UNFIT, NO_FRONT = 0, 2, 3  # how a worker's process exits


class Order(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One life: what it takes, and whom it works for. The secret is for pipes, never for names,
    arguments of programs or logs.
    """

    ticket: str  # by which the front end knows this life when it comes
    name: str  # for people
    role: Role
    num_cpus: float
    timeout_s: float  # for a place to be found
    host: str  # of the front end
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"Order({self.ticket!r}, {self.name!r})"


class Placed(msgspec.Struct, frozen=True, tag=True):
    """It begins on this node, of which `num_sharing` such workers would take the whole."""

    ticket: str
    node: str
    num_sharing: int = 1


class NoPlace(msgspec.Struct, frozen=True, tag=True):
    """There is none, and why. This life is over."""

    ticket: str
    reason: str
    hint: str = ""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Its process is no more; the reason completes "it has ended, with"."""

    ticket: str
    reason: str


News: TypeAlias = Placed | NoPlace | Ended


class Placer(Protocol):
    """Any thread may call it; nothing of it waits for anything."""

    def place(self, order: Order, hear: Callable[[News], None]) -> None:
        """Begin a life as soon as there is a place. `hear` is called from another thread, the last
        time with a NoPlace or an Ended, which comes for sure.
        """
        ...

    def end(self, ticket: str) -> None:
        """End that life at once, whatever it does. Idempotent; unknown ones are fine."""
        ...

    def close(self) -> None:
        """End all lives, and wait a moment for that."""
        ...
