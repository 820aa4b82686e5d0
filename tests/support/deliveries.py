"""Sources of bytes, and connections that take them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from headrace.server.delivery import Delivery


class Source:
    """Makes what it is fed; knows whether it was let go."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.is_closed = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True

    def feed(self, *items: bytes | Exception | None) -> None:
        for item in items:
            self.queue.put_nowait(item)


cuts: list[str] = []


def delivery_of(source: Source, limit: int | None = None) -> Delivery:
    return Delivery(
        source.chunks(),
        limit_bytes=limit,
        error_bytes=lambda error: b"<" + str(error).encode() + b">",
        cut=lambda: cuts.append("cut"),
    )


def run(test: Callable[[Source], Coroutine[Any, Any, None]]) -> None:
    cuts.clear()
    asyncio.run(test(Source()))


async def rest(delivery: Delivery) -> bytes:
    return b"".join([chunk async for chunk in delivery])


class Connection:
    """Takes bytes as long as it has room; `drain` makes some."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_open = True
        self.has_room = True
        self.on_room: Callable[[], None] | None = None

    def write(self, body: bytes) -> bool:
        self.sent.append(body)
        return self.has_room

    def drain(self) -> None:
        self.has_room = True
        assert self.on_room is not None
        self.on_room()


def pushing(delivery: Delivery, connection: Connection, every_s: float = 60) -> asyncio.Task[None]:
    return asyncio.create_task(delivery.push(connection, comment=b":", every_s=every_s))


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Clock:
    """Stands in for the `time` module of `delivery`."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns
