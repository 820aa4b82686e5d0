"""One request at one engine, from its first byte to the last of its answer.

Decides what counts as an engine's fault, as long as no byte of the answer has left; refuses to know
where the request goes then.
"""

import asyncio
import math
import os
import socket
import ssl
import time
from dataclasses import dataclass
from enum import Enum
from typing import Final

from headrace.cluster.gateway.engine import Engine
from headrace.cluster.gateway.headers import Raw
from headrace.cluster.gateway.link import (
    Link,
    LinkError,
    Links,
    Sink,
    is_own_trouble,
    request_head,
)
from headrace.core.base.errors import OverloadError
from headrace.core.base.types import Ns
from headrace.server.service import RETRY_AFTER_S

CONNECT_TIMEOUT_S: Final = 5.0
MAX_REFUSAL_BYTES: Final = 1 << 20  # of an answer that is kept while other engines are asked
EVENTS: Final = b"text/event-stream"

_BUSY: Final = (429, 503)


class Kind(Enum):
    REFUSED = "refused"  # nobody listens there
    BROKEN = "broken"
    BUSY = "busy"  # it has no room, or not yet


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that another engine may better."""

    status: int
    headers: Raw
    body: bytes

    @property
    def retry_after_s(self) -> float:
        texts = [value for name, value in self.headers if name.lower() == b"retry-after"]
        try:
            seconds = float(texts[0]) if texts else 1.0
        except ValueError:  # a date, which no engine is known to send
            return 1.0
        return max(0.0, seconds) if math.isfinite(seconds) else 1.0


class Fault(Exception):
    """An engine has not answered as it should; `str` is for the operator."""

    def __init__(self, kind: Kind, reason: str, refusal: Refusal | None = None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.refusal = refusal


class Call:
    """`close` it in every case: what still runs at the engine ends with the connection."""

    def __init__(self, links: Links, engine: Engine) -> None:
        self.heard_ns = Ns(time.monotonic_ns())
        self.status = 0
        self.headers: Raw = ()
        self.first = b""  # bytes of the body; empty = it has none
        self._links = links
        self._engine = engine
        self._link: Link | None = None
        self._connecting: asyncio.Timeout | None = None
        self._verdict = ""

    async def begin(self, path: str, headers: Raw, body: bytes, timeout_s: float) -> None:
        """Return when the first bytes of the answer are here. Raises Fault, and OverloadError where
        this process can open no connection, which is no engine's fault.
        """
        self._engine.calls.add(self)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(timeout_s, self.lose, f"no byte within {timeout_s:g} s")
        try:
            await self._begin(path, headers, body)
        except LinkError as error:
            raise self._broken(str(error)) from None
        finally:
            timer.cancel()

    async def _begin(self, path: str, headers: Raw, body: bytes) -> None:
        head = request_head(self._engine.address.url, path, headers, len(body))
        link = await self._ask(head, body)
        self.status, self.headers = link.status, link.headers
        if 300 <= self.status < 400:
            raise Fault(Kind.BROKEN, f"a redirect ({self.status}), which is not followed")
        if self.status >= 500 or self.status in _BUSY:
            kind = Kind.BUSY if self.status in _BUSY else Kind.BROKEN
            refusal = Refusal(self.status, self.headers, await self._read_refusal(link, path))
            raise Fault(kind, f"status {self.status}", refusal)
        self.first = await link.read()

    async def _ask(self, head: bytes, body: bytes) -> Link:
        """The connection that an answer has begun on: a fresh one, where one that had waited turns
        out to be closed at its other end.
        """
        waiting = self._links.take_waiting(self._engine.address.url)
        while True:
            self._link = link = waiting or await self._connect()
            link.on_heard = self._hear
            link.ask(head, body)
            try:
                await link.hear_head()
            except LinkError:
                if self._verdict or not link.was_stale:
                    raise
                self._give_back()
                waiting = None
            else:
                return link

    async def _connect(self) -> Link:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S) as self._connecting:
                return await self._links.take(self._engine.address.url, is_fresh=True)
        except TimeoutError:
            raise self._broken("no answer in time") from None
        except OSError as error:
            if is_own_trouble(error):
                raise OverloadError(
                    "the gateway can open no more connections", retry_after_s=RETRY_AFTER_S
                ) from error
            raise Fault(Kind.REFUSED, self._verdict or _why_not(error)) from None
        finally:
            self._connecting = None

    async def _read_refusal(self, link: Link, path: str) -> bytes:
        body = bytearray()
        while data := await link.read():
            body += data
            if len(body) > MAX_REFUSAL_BYTES:
                raise Fault(Kind.BROKEN, f"more than {MAX_REFUSAL_BYTES} bytes on {path}")
        return bytes(body)

    async def read_if_short(self) -> None:
        """Have all of an answer whose length was said and is no more than MAX_REFUSAL_BYTES, so
        that another engine may be asked where less comes. Raises Fault.
        """
        num_bytes = self._stated_bytes()
        while self.first and len(self.first) < num_bytes <= MAX_REFUSAL_BYTES:
            try:
                self.first += await self.read()
            except Fault as fault:
                come = f"{len(self.first)} of {num_bytes} bytes of its body have come"
                raise Fault(fault.kind, f"{fault}: {come}") from None

    def _stated_bytes(self) -> int:
        """Of a body that is no stream of events, which says itself where it ends; 0 = unknown."""
        headers = {name.lower(): value for name, value in self.headers}
        if headers.get(b"content-type", b"").lower().startswith(EVENTS):
            return 0
        stated = headers.get(b"content-length", b"")
        return int(stated) if stated.isdigit() else 0

    async def read(self) -> bytes:
        """What follows, as it comes; empty = the answer is over. Raises Fault."""
        assert self._link is not None
        try:
            return await self._link.read()
        except LinkError as error:
            raise self._broken(str(error)) from None

    async def pour(self, sink: Sink) -> None:
        """Give all that follows to `sink`, in the turn of the loop that it comes in. Raises
        Fault.
        """
        assert self._link is not None
        try:
            await self._link.pour(sink)
        except LinkError as error:
            raise self._broken(str(error)) from None

    def resume(self) -> None:
        """The sink takes more."""
        if self._link is not None:
            self._link.resume()

    def _hear(self) -> None:
        self.heard_ns = self._engine.heard_ns = Ns(time.monotonic_ns())

    def lose(self, reason: str) -> None:
        self._verdict = self._verdict or reason
        if self._link is not None:
            self._link.fail(reason)
        elif self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        self._engine.calls.discard(self)
        self._give_back()

    def _give_back(self) -> None:
        if self._link is not None:
            self._links.give_back(self._engine.address.url, self._link)
            self._link = None

    def _broken(self, reason: str) -> Fault:
        return Fault(Kind.BROKEN, self._verdict or reason)


def _why_not(error: OSError) -> str:
    """Why nobody could be reached, without the address."""
    if isinstance(error, ssl.SSLError):
        return "cannot connect: TLS failed"
    if isinstance(error, socket.gaierror):
        return "cannot connect: no such host"
    return (
        f"cannot connect: {os.strerror(error.errno).lower() if error.errno else 'nobody listens'}"
    )
