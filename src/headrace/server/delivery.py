"""The bytes of one answer on their way to one client.

A task reads the source as fast as it makes bytes; the response takes them as fast as the client
reads, or they are pushed to its connection in the turn of the loop that makes them. What lies
between is joined and bounded, so a slow reader costs no more than its bound and never holds back
another request.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress

from headrace.core.base.errors import HeadraceError
from headrace.core.base.types import Ns
from headrace.core.config.units import format_bytes, size_text
from headrace.core.telemetry import ClientWait
from headrace.server.exchange import Pipe

KEEPS_UP_NS = 1_000_000  # a send may take this long without anybody having waited


class SlowReader(HeadraceError):
    """The client reads more slowly than its answer is made, by more than the buffer holds."""


class Delivery:
    """Owns a task that runs `source`; `aclose` ends it and, with it, everything that the source
    holds.

    An error of the source before `commit` is raised to whoever waits; afterwards it becomes
    `error_bytes(error)`, the last bytes. Belongs to one event loop.
    """

    stall_s = 1.0  # how long the buffer may stay over its limit

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        limit_bytes: int | None,
        error_bytes: Callable[[BaseException], bytes],
        cut: Callable[[], None],
    ) -> None:
        """`limit_bytes` None = unbounded (an answer sent whole); `cut` breaks the connection of a
        slow reader.
        """
        self._limit_bytes = limit_bytes
        self._error_bytes = error_bytes
        self._cut = cut
        self._pending = bytearray()
        self._error: BaseException | None = None
        self._verdict: Exception | None = None  # why the server itself ended it
        self._is_committed = False
        self._is_done = False
        self._pipe: Pipe | None = None  # takes bytes at once, as long as it has room
        self._has_room = True
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        # For so long the client has had bytes to take, without a pause; None = it has caught up.
        self._behind_ns: Ns | None = None
        self._left_ns: Ns | None = None  # when the last bytes left; None = they are leaving
        self._task = asyncio.create_task(self._run(source))
        self._task.add_done_callback(self._on_done)

    @property
    def error(self) -> BaseException | None:
        """What ended the answer early, if anything did."""
        return self._error

    @property
    def is_done(self) -> bool:
        """Whether the source has ended; its last bytes may still be on their way."""
        return self._is_done

    async def first(self, timeout_s: float | None) -> None:
        """Return when there are bytes, when the source has ended, or after the timeout. Raises the
        source's error.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self._pending or self._is_done):
                    await self._wait()
        self._raise()

    async def whole(self) -> bytes:
        """All bytes, when the source has ended. Raises the source's error."""
        while not self._is_done:
            await self._wait()
        self._raise()
        return bytes(self._pending)

    def commit(self) -> None:
        """From here on the client has an answer's beginning: an error can only be its end."""
        self._is_committed = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Bytes as they come, joined as far as the client is behind."""
        while True:
            if self._pending:
                chunk = bytes(self._pending)
                self._pending.clear()
                self._taken.set()
                self._left_ns = None
                if self._behind_ns is None:
                    self._behind_ns = Ns(time.monotonic_ns())
                yield chunk
                self._left_ns = Ns(time.monotonic_ns())
            elif self._is_done:
                return
            else:
                self._behind_ns = None
                await self._wait()

    async def push(self, pipe: Pipe, *, comment: bytes, every_s: float) -> None:
        """Send all bytes by `pipe` as they come, and return when it has them; now and then a
        comment, which is no part of the answer.
        """
        self._pipe = pipe
        pipe.on_room = self._on_room
        self._push()
        while self._pending or not self._is_done:
            try:
                async with asyncio.timeout(every_s):
                    await self._wait()
            except TimeoutError:
                if self._has_room and not self._is_done:
                    self._has_room = pipe.write(comment)

    @property
    def is_open(self) -> bool:
        """See `generation.Outlet`."""
        return self._pipe is not None and self._has_room and not (self._pending or self._is_done)

    def send(self, chunk: bytes) -> None:
        """See `generation.Outlet`."""
        assert self._pipe is not None
        self._has_room = self._pipe.write(chunk)
        self._behind_ns = None

    def _on_room(self) -> None:
        self._has_room = True
        if self._pending:
            self._push()
            self._left_ns = Ns(time.monotonic_ns())

    def _push(self) -> None:
        """What is there goes out, if there is room; else it is the client's to wait for."""
        assert self._pipe is not None
        if not self._has_room:
            if self._behind_ns is None:
                self._behind_ns = Ns(time.monotonic_ns())
            self._left_ns = None
            return
        if self._pending:
            chunk = bytes(self._pending)
            self._pending.clear()
            self._taken.set()
            self._has_room = self._pipe.write(chunk)
        if self._is_done:
            self._changed.set()

    def client_wait(self) -> ClientWait | None:
        """How long the last bytes waited for the client, who may have left; None = it kept up."""
        if self._behind_ns is None:
            return None
        until_ns = Ns(time.monotonic_ns()) if self._left_ns is None else self._left_ns
        if until_ns - self._behind_ns < KEEPS_UP_NS:
            return None
        return ClientWait(self._behind_ns, until_ns)

    def fail(self, error: Exception) -> None:
        """End the answer with an error that is the server's, as at the end of a drain."""
        if not self._task.done():
            self._verdict = error
            self._task.cancel()

    async def aclose(self) -> None:
        """Cancel the source and wait until it has let go. Idempotent."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, source: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(source):
            async for chunk in source:
                if chunk:
                    self._pending += chunk
                    if self._pipe is None:
                        self._changed.set()
                    else:
                        self._push()
                        if not self._pending:
                            self._behind_ns = None  # it has caught up
                            continue
                    await self._make_room()

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        """Runs in every case, also where the task was cancelled before it began."""
        self._error = self._verdict if task.cancelled() else task.exception()
        if isinstance(self._error, SlowReader):
            self._pending.clear()
            self._cut()
        elif self._error is not None and self._is_committed:
            self._pending += self._error_bytes(self._error)
        self._is_done = True
        if self._pipe is not None and self._pending:
            self._push()
        self._changed.set()

    async def _make_room(self) -> None:
        """Wait while the buffer is over its limit, but not for long."""
        if self._limit_bytes is None or len(self._pending) <= self._limit_bytes:
            return
        try:
            async with asyncio.timeout(self.stall_s):
                while len(self._pending) > self._limit_bytes:
                    self._taken.clear()
                    await self._taken.wait()
        except TimeoutError:
            raise SlowReader(
                f"the client reads too slowly: {format_bytes(len(self._pending))} wait,"
                f" the limit is {size_text(self._limit_bytes)}"
            ) from None

    def _raise(self) -> None:
        if self._error is not None and not self._is_committed:
            raise self._error

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
