"""The Mover port: who carries out a StartCopy, and shows this worker's own blocks to others."""

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.core.base.events import CopyDone, KvChange, StartCopy

OnCopyDone = Callable[[CopyDone], None]


class Mover(Protocol):
    @property
    def address(self) -> str:
        """The place, as other workers' movers call it; empty = nobody can copy from here."""
        ...

    def publish(self, changes: Sequence[KvChange]) -> None:
        """These blocks may be copied from here on, or may not any more. Called before anything
        writes to a block that was removed, and quick.
        """
        ...

    def start(self, copy: StartCopy, on_done: OnCopyDone) -> None:
        """Copy in the background; `on_done` is called exactly once, from any thread.

        Blocks arrive in their order; the first one that is not there, is not whole or is not what
        its name says ends the copy. A source that cannot be reached is a copy of no blocks.
        """
        ...

    def close(self) -> None:
        """End copies that run, each with its CopyDone, and free everything. Idempotent."""
        ...
