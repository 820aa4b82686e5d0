"""One request at one engine, from its first byte to the last of its answer.

Decides what counts as an engine's fault, as long as no byte of the answer has left; refuses to know
where the request goes then.
"""

import asyncio
import math
import os
import time
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from typing import Final

import aiohttp
from yarl import URL

from headrace.cluster.gateway.engine import Engine
from headrace.cluster.gateway.headers import Raw
from headrace.core.base.types import Ns

CONNECT_TIMEOUT_S: Final = 5.0
MAX_REFUSAL_BYTES: Final = 1 << 20  # of an answer that is kept while other engines are asked
PIECE_BYTES: Final = 1 << 18
KEEP_ALIVE_S: Final = 3.0  # shorter than any engine's, so that none closes what is about to be used

_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
# What aiohttp would say of itself; a client's own headers go on instead.
_OWN_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
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


def open_session() -> aiohttp.ClientSession:
    """What all calls of one event loop share: connections, and nothing else."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_OWN_HEADERS,
        timeout=_TIMEOUT,
        trust_env=False,
    )


class Call:
    """`close` it in every case: what still runs at the engine ends with the connection."""

    def __init__(self, session: aiohttp.ClientSession, engine: Engine) -> None:
        self.heard_ns = Ns(time.monotonic_ns())
        self.status = 0
        self.headers: Raw = ()
        self.first = b""  # bytes of the body; empty = it has none
        self._session = session
        self._engine = engine
        self._response: aiohttp.ClientResponse | None = None
        self._timer: asyncio.Timeout | None = None
        self._verdict = ""

    async def begin(
        self, path: str, headers: list[tuple[str, str]], body: bytes, timeout_s: float
    ) -> None:
        """Return when the first bytes of the answer are here. Raises Fault."""
        self._engine.calls.add(self)
        try:
            async with asyncio.timeout(timeout_s) as self._timer:
                await self._begin(path, headers, body)
        except aiohttp.ClientError as error:
            raise self._fault(error) from None
        except TimeoutError:
            reason = self._verdict or f"no byte within {timeout_s:g} s"
            raise Fault(Kind.BROKEN, reason) from None
        except OSError as error:
            raise self._fault(error) from None
        finally:
            self._timer = None

    async def _begin(self, path: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self._response = response = await self._session.post(
            URL(self._engine.address.url + path, encoded=True),
            # One that is large is written piece by piece, so that it does not hold up others.
            data=body if len(body) <= PIECE_BYTES else BytesIO(body),
            headers=headers,
            allow_redirects=False,
        )
        self.status, self.headers = response.status, response.raw_headers
        if 300 <= self.status < 400:
            raise Fault(Kind.BROKEN, f"a redirect ({self.status}), which is not followed")
        if self.status >= 500 or self.status in _BUSY:
            kind = Kind.BUSY if self.status in _BUSY else Kind.BROKEN
            body = await read_bounded(response, MAX_REFUSAL_BYTES)
            raise Fault(kind, f"status {self.status}", Refusal(self.status, self.headers, body))
        self.first = await response.content.readany()
        self._hear()

    async def read(self) -> bytes:
        """What follows, as it comes; empty = the answer is over. Raises Fault."""
        assert self._response is not None
        try:
            chunk = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise self._fault(error) from None
        self._hear()
        return chunk

    def _hear(self) -> None:
        self.heard_ns = self._engine.heard_ns = Ns(time.monotonic_ns())

    @property
    def is_cut_off(self) -> bool:
        """Whether the connection is closed, with the body open. aiohttp tells no reader of a body
        that its framing became garbage.
        """
        if self._response is None or self._response.connection is None:
            return False
        transport = self._response.connection.transport
        return transport is None or transport.is_closing()

    def lose(self, reason: str) -> None:
        self._verdict = self._verdict or reason
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())
        elif self._response is not None:
            self._response.close()

    def close(self) -> None:
        self._engine.calls.discard(self)
        if self._response is not None:
            self._response.close()

    def _fault(self, error: Exception) -> Fault:
        is_refused = isinstance(error, aiohttp.ClientConnectorError)
        # Without the message, which may repeat what a client or an engine has said.
        reason = self._verdict or reason_of(error)
        return Fault(Kind.REFUSED if is_refused else Kind.BROKEN, reason)


def reason_of(error: BaseException) -> str:
    """Without addresses, and without what was said on the connection."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientSSLError):
        return "cannot connect: TLS failed"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"cannot connect: {os.strerror(number).lower() if number else 'no such host'}"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer broke off"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the answer is no HTTP"
    return "the connection broke"


async def read_bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body. Raises Fault where it is larger."""
    body = bytearray()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > limit_bytes:
            raise Fault(Kind.BROKEN, f"more than {limit_bytes} bytes on {response.url.path}")
    return bytes(body)
