"""From the engine thread to those who wait: what one event has to say to a reader arrives at once.

A step of 32 sequences makes 32 effects. To wake an event loop for each of them would cost more than
the work they carry, so they are gathered until the event is done.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Gathers items on one thread until they are flushed, as a list, to `deliver`."""

    def __init__(self, deliver: Callable[[list[Item]], None]) -> None:
        self._deliver = deliver
        self._items: list[Item] = []

    def put(self, item: Item) -> bool:
        """Whether the outbox was empty before, and so has to be flushed."""
        self._items.append(item)
        return len(self._items) == 1

    def flush(self) -> None:
        items, self._items = self._items, []
        self._deliver(items)


class AsyncInbox(Generic[Item]):
    """A queue within one event loop: one reader, who takes all there is. Not thread-safe.

    What comes while the reader waits goes to `look` first, which returns what is left of it for the
    reader; None wakes nobody.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        look: Callable[[Item], Item | None] = lambda item: item,
    ) -> None:
        self._loop = loop
        self._look = look
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._items.append(item)
        elif (left := self._look(item)) is not None:
            self._items.append(left)
            waiter.set_result(None)

    async def take(self) -> list[Item]:
        """All items, at least one."""
        if not self._items:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = list(self._items)
        self._items.clear()
        return items
