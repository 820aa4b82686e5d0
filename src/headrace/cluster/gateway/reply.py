"""What a client is sent of an engine's answer: its bytes, as they come.

Of an event stream only whole events are sent, so that one that breaks off can still end with an
event that says so.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import Send

from headrace.cluster.gateway.headers import Raw
from headrace.core.base.errors import HeadraceError, RequestError
from headrace.server.exchange import Exchange, Pipe
from headrace.server.sse import error_event

MAX_EVENT_BYTES: Final = 4 << 20  # of an event that is kept back until it is whole
NO_CONTENT: Final = 204
LAST_WORDS_S: Final = 2.0  # for an error that ends an answer to leave

_ENDS: Final = (b"\n\n", b"\r\n\r\n")
_DONE: Final = (b"data: [DONE]", b"data:[DONE]")
_ERROR: Final = (b'data: {"error"', b'data:{"error"', b"event: error")


class Events:
    """An event stream, cut where events end."""

    def __init__(self) -> None:
        self.num = 0  # whole events so far, of a stream that ends them all alike
        self._rest = b""  # of one that is not whole
        self._last = b""  # whole events, the last one included

    def take(self, chunk: bytes) -> bytes:
        """What can go on: of this, and of what was kept back."""
        data = self._rest + chunk
        end = _last_end(data)
        if end == 0 and len(data) > MAX_EVENT_BYTES:
            end = len(data)
        self._rest = data[end:]
        if end == 0:
            return b""
        self._last = data[:end]
        self.num += self._last.count(b"\n\n") or self._last.count(b"\r\n\r\n")
        return self._last

    def flush(self) -> bytes:
        """What was kept back, when nothing more comes."""
        rest, self._rest = self._rest, b""
        return rest

    @property
    def is_whole(self) -> bool:
        """Whether its last event is one that nothing follows: [DONE], or the engine's own error."""
        last = (self._rest or self._last).rstrip()
        begin = max(last.rfind(mark) + len(mark) if mark in last else 0 for mark in _ENDS)
        return last.startswith((*_DONE, *_ERROR), begin)


def _last_end(data: bytes) -> int:
    """Behind the last event that is whole; 0 = none is."""
    if data.endswith(_ENDS):
        return len(data)
    return max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _ENDS)


class Reply:
    """One answer on its way to one client."""

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self.is_begun = False
        self.events: Events | None = None  # where it is a stream of them
        self._exchange = exchange
        self._send = send
        self._pipe: Pipe | None = None

    async def begin(self, status: int, headers: Raw) -> None:
        self.is_begun = True
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        if kind.lower().startswith(b"text/event-stream"):
            self.events = Events()
            self._exchange.is_stream = True
        if self.events is not None or status == NO_CONTENT:
            # One that breaks off gets an end of its own; and where there is no body, there is none.
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def pass_on(self, chunk: bytes) -> None:
        if self.events is not None:
            chunk = self.events.take(chunk)
        if chunk:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    def begin_push(self, on_room: Callable[[], None]) -> bool:
        """Whether the rest may be pushed: a stream of events, to a connection that can do it."""
        pipe = self._exchange.pipe if self.events is not None else None
        if pipe is None or not pipe.is_open:
            return False
        pipe.on_room = on_room
        self._pipe = pipe
        return True

    def push(self, chunk: bytes) -> bool:
        """As `pass_on`, at once. False = nothing more until there is room."""
        assert self.events is not None
        assert self._pipe is not None
        chunk = self.events.take(chunk)
        return self._pipe.write(chunk) if chunk else True

    async def end(self) -> None:
        await self._close(b"" if self.events is None else self.events.flush())

    async def fail(self, error: HeadraceError) -> None:
        """The answer breaks off, and the client can tell: by an event, or by its connection."""
        self._exchange.error = f"{type(error).__name__}: {error.message}"
        if self.events is not None:
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._close(error_event(error))
                return
            except TimeoutError:
                pass  # it does not read
        self._exchange.abort()

    async def _close(self, last: bytes) -> None:
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


def broken_off() -> RequestError:
    return RequestError(
        "the engine failed in the middle of the answer",
        status_hint=502,
        code="engine_failed",
        hint="ask again",
    )
