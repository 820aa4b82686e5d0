"""Who is told how far a simulation is; decides nothing of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from headrace.core.base.types import Ns

Seen = Callable[[Ns], None]
"""Hears when each request ended, by the simulation's clock."""

Watching = Callable[[str, int], AbstractContextManager[Seen]]
"""Of a run's name and the number of its requests: who hears of them."""


def unseen(_: Ns) -> None:
    """Nobody waits."""


@contextmanager
def unwatched(_: str, __: int) -> Iterator[Seen]:
    yield unseen
