"""A connection to an engine: HTTP/1.1, one request after another, answers handed on as they come.

Decides what is an answer, and when a connection may be used again; refuses to know what is asked.
What an engine sends goes to whoever takes it within the same turn of the loop that read it, and
what nobody takes stays in the socket.
"""

import asyncio
import errno
import ssl
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Final
from urllib.parse import SplitResult, urlsplit

import httptools

from headrace.cluster.gateway.headers import Raw

MAX_HEAD_BYTES: Final = 64 << 10  # and of what else is no body: between its pieces, and behind it
KEEP_ALIVE_S: Final = 3.0  # shorter than any engine's, so that none closes what is about to be used
MAX_UNTAKEN_BYTES: Final = 1 << 18
BUSY_LINKS: Final = 4  # of one engine in use, from which on one more waits for the next request
# What keeps this process from opening a connection, whoever would be at its other end.
_OWN_TROUBLES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_HTTP: Final = "the answer is no HTTP"

# Takes bytes of a body; False = nothing more until `Link.resume`.
Sink = Callable[[bytes], bool]


class LinkError(Exception):
    """There is no answer, or no more of it. `str` repeats nothing that was said there."""


class Link(asyncio.Protocol):
    """All methods run on the event loop. One that is closed, or has failed, is of no more use."""

    def __init__(self) -> None:
        self.on_heard: Callable[[], None] = _nobody_hears  # called when bytes have come
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._fault = ""
        self._is_paused = False
        self.has_waited = False  # for its request, so that it may be closed at its other end
        self.expect_nothing()

    def expect_nothing(self) -> None:
        """Forget what has come: another request may follow."""
        self.status = 0  # of the answer, once its head is here
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_over = True  # the answer is whole
        self._has_body = False  # what has just come
        self._num_bare_bytes = 0  # that have come without any of a body
        self._ends_with_connection = False
        self._may_stay = True
        self._pieces: list[bytes] = []  # of the body, that nobody has taken
        self._sink: Sink | None = None
        self._parser = httptools.HttpResponseParser(self)

    # ---- one request

    def ask(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self.is_over = False
        # The body may be large: it is not copied for the sake of one call.
        self._transport.writelines((head, body))

    async def hear_head(self) -> None:
        """Return when `status` and `headers` are known."""
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """What has come of the body since; empty = it is whole."""
        while not (self._pieces or self.is_over):
            await self._wait()
        data = b"".join(self._pieces)
        self._pieces.clear()
        self.resume()
        return data

    async def pour(self, sink: Sink) -> None:
        """Give the rest of the body to `sink`, and return when it was all."""
        self._sink = sink
        if self._is_paused:  # more had come than may lie here
            self.resume()
        else:
            self._deliver()
        try:
            while not self.is_over or self._pieces:
                await self._wait()
        finally:
            self._sink = None

    def resume(self) -> None:
        """Whoever said that nothing more may come takes more."""
        if not self._is_paused:
            return
        self._is_paused = False
        self._deliver()
        if not self._is_paused:
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
            self._wake()

    async def _wait(self) -> None:
        if self._fault:
            raise LinkError(self._fault)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def _has_ended(self) -> bool:
        return self.is_over or bool(self._fault)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _deliver(self) -> None:
        if self._sink is None or not self._pieces or self._is_paused:
            return
        pieces, self._pieces = self._pieces, []
        if not self._sink(pieces[0] if len(pieces) == 1 else b"".join(pieces)):
            self._pause()

    def _pause(self) -> None:
        self._is_paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    # ---- the end of it

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow."""
        return (
            self.is_over
            and not self._fault
            and not self._is_paused
            and self._transport is not None
            and not self._transport.is_closing()
            and self._may_stay
            # An engine may answer before it has read all of a request, and leave the rest.
            and not self._transport.get_write_buffer_size()
        )

    @property
    def was_stale(self) -> bool:
        """Whether it had waited before it was asked, and not a byte has come since: where it breaks
        then, it may have been closed at its other end before.
        """
        return self.has_waited and not (self.status or self._num_bare_bytes)

    def fail(self, reason: str) -> None:
        """Wait for nothing more. Idempotent; the first reason counts."""
        self._fault = self._fault or reason
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def close(self) -> None:
        """At once, which is how an engine learns that nobody waits any more."""
        if self._transport is not None:
            self._transport.abort()

    # ---- the transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._fault:
            return
        if self.is_over:
            self.fail("the engine said more than was asked")
            return
        self.on_heard()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.fail(NO_HTTP)
        if self._has_body:
            self._num_bare_bytes, self._has_body = 0, False
        else:
            self._num_bare_bytes += len(data)
            if self._num_bare_bytes > MAX_HEAD_BYTES:
                self.fail(NO_HTTP)
        if self._sink is not None:
            self._deliver()
            if self._has_ended:
                self._wake()
        else:
            if sum(map(len, self._pieces)) > MAX_UNTAKEN_BYTES:
                self._pause()
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over:
            if self._ends_with_connection and exc is None and not self._fault:
                self.is_over = True
            else:
                word = "the answer broke off" if self.status else "the connection broke"
                self._fault = self._fault or word
        self._wake()

    # ---- the parser's calls

    def on_message_begin(self) -> None:
        if self.status:
            raise ValueError("a second answer")  # which ends the parsing

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is behind the body
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            raise ValueError("a status that nobody knows")
        if status < 200:
            self.headers.clear()  # another head follows
            return
        codings = self._values(b"transfer-encoding")
        if codings not in ([], [b"chunked"]):
            raise ValueError("a coding that nobody has asked for")
        self.status = status
        self._ends_with_connection = not (codings or self._values(b"content-length"))

    def _values(self, wanted: bytes) -> list[bytes]:
        return [value.strip().lower() for name, value in self.headers if name.lower() == wanted]

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_over = bool(self.status)
        self._may_stay = self._parser.should_keep_alive()  # which it knows in here alone


class Links:
    """Connections to engines, those that wait for another request included. While more and more are
    in use at an engine, one is made ahead of each request.
    """

    def __init__(self) -> None:
        self._idle: dict[str, dict[Link, asyncio.TimerHandle]] = {}  # the longest unused first
        self._num_used: Counter[str] = Counter()
        self._coming: dict[str, asyncio.Task[None]] = {}  # the one that is made ahead

    def take_waiting(self, url: str) -> Link | None:
        """One to the server at this address that waits for a request, if any does."""
        idle = self._idle.get(url, {})
        while idle:
            link, timer = idle.popitem()
            timer.cancel()
            if link.is_reusable:
                break
        else:
            link = None
        if not idle and self._num_used[url] >= BUSY_LINKS and url not in self._coming:
            self._coming[url] = asyncio.create_task(self._add_waiting(url))
        self._num_used[url] += link is not None
        return link

    async def take(self, url: str, *, is_fresh: bool = False) -> Link:
        """One that has waited, or has just been made. OSError where it cannot be had."""
        link = None if is_fresh else self.take_waiting(url)
        if link is None:
            link = await self._connect(url)
            self._num_used[url] += 1
        return link

    async def _add_waiting(self, url: str) -> None:
        try:
            self._wait(url, await self._connect(url))
        except OSError:
            pass  # whoever needs one will be told
        finally:
            del self._coming[url]

    async def _connect(self, url: str) -> Link:
        parts = _split(url)
        is_secure = parts.scheme == "https"
        _, link = await asyncio.get_running_loop().create_connection(
            Link,
            parts.hostname or "",
            parts.port or (443 if is_secure else 80),
            ssl=_tls() if is_secure else None,
        )
        return link

    def give_back(self, url: str, link: Link) -> None:
        """It waits for another request, or is closed."""
        self._num_used[url] -= 1
        if link.is_reusable:
            self._wait(url, link)
        else:
            link.close()

    def _wait(self, url: str, link: Link) -> None:
        link.on_heard = _nobody_hears
        link.has_waited = True
        link.expect_nothing()  # while nobody waits for it
        idle = self._idle.setdefault(url, {})
        loop = asyncio.get_running_loop()
        idle[link] = loop.call_later(KEEP_ALIVE_S, self._forget, idle, link)

    def _forget(self, idle: dict[Link, asyncio.TimerHandle], link: Link) -> None:
        del idle[link]
        link.close()

    def close(self) -> None:
        for task in self._coming.values():
            task.cancel()
        for idle in self._idle.values():
            for link, timer in idle.items():
                timer.cancel()
                link.close()
        self._idle.clear()


def is_own_trouble(error: OSError) -> bool:
    """Whether it says nothing of the other end."""
    return error.errno in _OWN_TROUBLES


def _nobody_hears() -> None:
    pass


def request_head(url: str, path: str, headers: Raw, num_body_bytes: int) -> bytes:
    """Of a POST. Names and values of headers are those of a request that was parsed."""
    parts = _split(url)
    lines = [
        b"POST %b HTTP/1.1\r\nhost: %b" % ((parts.path + path).encode(), parts.netloc.encode())
    ]
    lines += [b"%b: %b" % pair for pair in headers]
    lines.append(b"content-length: %d\r\n\r\n" % num_body_bytes)
    return b"\r\n".join(lines)


@cache
def _split(url: str) -> SplitResult:
    return urlsplit(url)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
