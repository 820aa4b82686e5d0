"""The feed of one engine's KV events: a ZeroMQ subscription, and a replay of what it missed.

Decides in which order batches are heard, and when an engine has begun anew; refuses to know what
they mean.

Frames of the feed are [topic, number, batch], the number being 8 bytes, big-endian, and one more
with each batch since the engine started. A replay is asked for with [empty, number], and answered
with [empty, number, batch], or with [empty, topic, number, batch] by later versions, for each batch
from there on that the engine still has, the number -1 last.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Final, Protocol

import zmq
import zmq.asyncio

from headrace.cluster.gateway.kv_wire import MAX_BATCH_BYTES

REPLAY_TIMEOUT_S: Final = 5.0  # without a batch
MAX_REPLAY_S: Final = 30.0  # in all, with a gap as its end: live batches wait meanwhile
MAX_REPLAYED: Final = 1 << 18  # batches
# ZeroMQ bounds a queue by messages, not by bytes. What has no room here waits at the engine, and
# what has none there is had again by a replay.
MAX_WAITING_BYTES: Final = 256 << 20
MAX_WAITING: Final = MAX_WAITING_BYTES // MAX_BATCH_BYTES
RETRY_S: Final = 5.0
REJOIN_S: Final = 0.1
RECONNECT_MS: Final = 100
MOST_RECONNECT_MS: Final = 5000

_END: Final = b"\xff" * 8
_ENDS: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

_log = logging.getLogger(__name__)


class KvListener(Protocol):
    def heard(self, payload: bytes) -> None:
        """The next batch."""
        ...

    def began_anew(self) -> None:
        """The engine has restarted: what was heard of it is void."""
        ...


class KvFeed:
    def __init__(self, name: str, events_url: str, replay_url: str, listener: KvListener) -> None:
        self.num_gaps = 0  # that no replay has filled
        self._name = name
        self._events_url = events_url
        self._replay_url = replay_url
        self._listener = listener
        self._next: int | None = None  # number of the batch that is to come
        self._live = -1  # number of the last batch of the subscription itself

    async def run(self) -> None:
        """Until it is cancelled."""
        context = zmq.asyncio.Context()
        try:
            while True:
                try:
                    await self._follow(context)
                    _log.info("engine %s: its stream of KV events has ended", self._name)
                    await asyncio.sleep(REJOIN_S)
                except zmq.ZMQError as error:
                    _log.error("engine %s: no KV events: %s", self._name, error)
                    await asyncio.sleep(RETRY_S)
        finally:
            context.destroy(linger=0)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        """Until the stream ends, and all that came by then is heard."""
        with (
            _socket(context, zmq.SUB, self._events_url) as socket,
            # ZeroMQ joins again by itself, but not after a message that is none or too long.
            socket.get_monitor_socket(_ENDS) as monitor,
        ):
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            await self._replay(context, self._next or 0)
            while socket in dict(await poller.poll()):
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8 and frames[1] != _END:
                    await self._take(context, int.from_bytes(frames[1], "big"), frames[2])
                # A message that is there already is handed out without a turn of the loop.
                await asyncio.sleep(0)

    async def _take(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        if number <= self._live:
            _log.info("engine %s has begun anew", self._name)
            self._listener.began_anew()
            self._next = 0
        self._live = number
        if self._next is None:
            self._next = number  # what was before is known to nobody
        if number > self._next:
            await self._replay(context, self._next)
        if number > self._next:
            self.num_gaps += 1
        if number >= self._next:
            self._next = number + 1
            self._listener.heard(payload)

    async def _replay(self, context: zmq.asyncio.Context, start: int) -> None:
        """Hear what the engine still has, from this number on, and has not been heard."""
        if not self._replay_url:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_REPLAY_S):
                # An engine drops what it sends faster than it is read, so that what follows a hole
                # counts only where asking for the rest brings no more.
                while await self._replay_once(context, start):
                    assert self._next is not None
                    start = self._next

    async def _replay_once(self, context: zmq.asyncio.Context, start: int) -> bool:
        """Whether to ask again: some of it came, and then there was a hole."""
        has_come = False
        with _socket(context, zmq.DEALER, self._replay_url) as socket:
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            for _ in range(MAX_REPLAYED):
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
                if len(frames) not in (3, 4) or frames[-2] == _END or len(frames[-2]) != 8:
                    return False
                number = int.from_bytes(frames[-2], "big")
                if number >= (self._next or 0):
                    # At the begin, a hole is one only where something was heard before.
                    is_hole = self._next is not None and number > self._next
                    if is_hole and has_come:
                        return True
                    self.num_gaps += is_hole
                    self._next = number + 1
                    self._listener.heard(frames[-1])
                    has_come = True
                await asyncio.sleep(0)
        return False


def _socket(context: zmq.asyncio.Context, kind: int, url: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MOST_RECONNECT_MS)
    try:
        socket.connect(url)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket
