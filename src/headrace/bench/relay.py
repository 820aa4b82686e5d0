"""What stands between clients and engines and does nothing: bytes in, bytes out, none of them read.

    python -m headrace.bench.relay PORT ENGINE_PORT...

What it adds to a request is what any process in this place would: two more sockets, two more
wake-ups. Connections to engines are kept as a gateway keeps them, and clients get one in turns.
"""

import asyncio
import sys
from itertools import cycle


class _Far(asyncio.Protocol):
    """A connection to an engine, of one client after another."""

    def __init__(self, idle: list["_Far"]) -> None:
        self.client: asyncio.Transport | None = None
        self.transport: asyncio.Transport | None = None
        self._idle = idle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.client is not None:
            self.client.write(data)

    def let_go(self) -> None:
        self.client = None
        self._idle.append(self)


class _Near(asyncio.Protocol):
    """A connection of a client: it gets another one at its first bytes."""

    def __init__(self, port: int, idle: list[_Far]) -> None:
        self._port = port
        self._idle = idle
        self._far: _Far | None = None
        self._early: list[bytes] = []
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._far is None and self._idle:
            self._begin(self._idle.pop())
        if self._far is not None and self._far.transport is not None:
            self._far.transport.write(data)
            return
        self._early.append(data)
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._far is not None:
            self._far.let_go()

    def _begin(self, far: _Far) -> None:
        self._far = far
        far.client = self._transport

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, far = await loop.create_connection(lambda: _Far(self._idle), "127.0.0.1", self._port)
        self._begin(far)
        assert far.transport is not None
        far.transport.writelines(self._early)


async def serve(port: int, engine_ports: list[int]) -> None:
    ways = cycle([(one, list[_Far]()) for one in engine_ports])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Near(*next(ways)), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1]), [int(word) for word in sys.argv[2:]]))
