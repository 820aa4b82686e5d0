"""Looks at one engine again and again: whether it is up, what it serves, how busy it is.

Decides when an engine is down: at once where it says so or where nobody listens; else when nothing
has come of it for a while, since a busy one may be slow to say how it is.
"""

import asyncio
import logging
import os
import time
from contextlib import suppress
from typing import Final, Protocol

import aiohttp
import msgspec
from yarl import URL

from headrace.cluster.gateway.engine import Engine
from headrace.cluster.gateway.link import KEEP_ALIVE_S, is_own_trouble
from headrace.cluster.gateway.load_page import load_of
from headrace.core.base.names import find_name_fault
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.router.events import WorkerLoad

LOOK_TIMEOUT_S: Final = 2.0
LOOKS_PER_LIST: Final = 20  # its models are asked for that often while it is up
MAX_ANSWER_BYTES: Final = 16 << 20

_UNKNOWN_ROUTE: Final = (404, 405, 501)
# What aiohttp would say of itself.
_OWN_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class TooMuch(Exception):
    """More than anybody wants to know."""


_TROUBLES: Final = (aiohttp.ClientError, OSError, TooMuch)  # TimeoutError is an OSError

_log = logging.getLogger(__name__)


class Listener(Protocol):
    def came_up(self, engine: Engine, cards: dict[str, msgspec.Raw]) -> None:
        """It answers; `cards` are its models as it shows them, by name."""
        ...

    def went_down(self, engine: Engine, reason: str) -> None:
        """Again with each look while it stays down."""
        ...

    def told(self, engine: Engine, load: WorkerLoad) -> None: ...


class Sick(Exception):
    """The engine itself says that it cannot answer."""


class _Card(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


class Watch:
    def __init__(
        self,
        engine: Engine,
        session: aiohttp.ClientSession,
        listener: Listener,
        silence_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._session = session
        self._listener = listener
        self._wake = asyncio.Event()
        self._num_looks = 0
        self._silence_timeout_ns = round(silence_timeout_s * NS_PER_S)
        self._answered_ns = Ns(time.monotonic_ns())  # last
        self._has_page = True

    async def run(self, pause_s: float) -> None:
        while True:
            self._wake.clear()
            await self._look()
            self._num_looks += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    def wake(self) -> None:
        """Look now: something is strange."""
        self._wake.set()

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await self._ask()
        except Sick as error:
            self._listener.went_down(self._engine, str(error))
        except aiohttp.ClientConnectorError as error:
            if not (self._engine.is_up and is_own_trouble(error.os_error)):
                self._listener.went_down(self._engine, reason_of(error))
        except _TROUBLES as error:
            self._in_vain(str(error) if isinstance(error, TooMuch) else reason_of(error))
        else:
            self._answered_ns = Ns(time.monotonic_ns())
            await self._read_load()

    def _in_vain(self, reason: str) -> None:
        silent_since_ns = Ns(time.monotonic_ns() - self._silence_timeout_ns)
        if max(self._answered_ns, self._engine.heard_ns) <= silent_since_ns:
            self._listener.went_down(self._engine, reason)
            self._engine.lose_calls(reason, silent_since_ns)

    async def _ask(self) -> None:
        status, _ = await self._get("/health")
        knows_health = status not in _UNKNOWN_ROUTE
        if knows_health and status >= 300:
            raise Sick(f"/health says {status}")
        is_due = self._num_looks % LOOKS_PER_LIST == 0
        if is_due or not (knows_health and self._engine.is_up):
            self._listener.came_up(self._engine, await self._read_cards())

    async def _read_cards(self) -> dict[str, msgspec.Raw]:
        status, body = await self._get("/v1/models")
        if status != 200:
            raise Sick(f"/v1/models says {status}")
        return read_cards(body)

    async def _read_load(self) -> None:
        """An engine that does not tell its load is as well as any other."""
        if not (self._has_page or self._num_looks % LOOKS_PER_LIST == 0):
            return
        with suppress(*_TROUBLES):
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                status, body = await self._get("/metrics")
            self._has_page = status == 200
            load = load_of(body.decode(errors="replace")) if self._has_page else None
            if load is not None:
                self._listener.told(self._engine, load)

    async def _get(self, path: str) -> tuple[int, bytes]:
        address = self._engine.address
        headers = {"authorization": f"Bearer {address.key}"} if address.key else {}
        url = URL(address.url + path, encoded=True)
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            body = bytearray()
            while chunk := await response.content.readany():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise TooMuch(f"more than {MAX_ANSWER_BYTES} bytes on {path}")
            return response.status, bytes(body)


def read_cards(body: bytes) -> dict[str, msgspec.Raw]:
    """What an engine shows of its models, by name. Sick where that is no list of models."""
    try:
        cards = msgspec.json.decode(body, type=_List).data
        found = {msgspec.json.decode(card, type=_Card).id: card.copy() for card in cards}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Sick("/v1/models is no list of models") from None
    for name in found:
        if fault := find_name_fault(name):
            raise Sick(f"the name of a model {fault}")
    return found


def open_session() -> aiohttp.ClientSession:
    """What all looks of one event loop share: connections, and nothing else."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_OWN_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None),  # a look has one of its own
        trust_env=False,
    )


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
