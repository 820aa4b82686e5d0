"""PoolMover: the Mover over a pool in shared memory, for others on this machine and beyond.

Decides which of a source's addresses to use; refuses to know which blocks are worth copying.
"""

import logging
import threading
from collections.abc import Sequence
from functools import partial

from headrace.adapters.movers.lane import ENDING, Lane, Source, StalledCopy
from headrace.adapters.movers.nixl import NixlAgent, NixlServer, NixlSource
from headrace.adapters.movers.pool import SharedPool, SharedSource, is_alive, is_here
from headrace.adapters.movers.port import OnCopyDone
from headrace.adapters.movers.tcp import BlockServer, TcpSource
from headrace.core.base.errors import TransferError
from headrace.core.base.events import BlocksStored, CopyDone, KvChange, StartCopy
from headrace.core.base.types import BlockId

_log = logging.getLogger(__name__)

BETWEEN = "|"  # addresses of one place


class PoolMover:
    """Copies from one place run one after another, and beside those from other places. None takes
    longer than `most_s`. With a `host` and a `secret`, workers of other machines may copy from
    here, and this one from them, also through NIXL where both have an agent. OSError where that
    host cannot be listened at.
    """

    def __init__(
        self,
        pool: SharedPool,
        *,
        host: str = "",
        secret: bytes = b"",
        nixl: NixlAgent | None = None,
        most_s: float = 10.0,
    ) -> None:
        self.pool = pool
        self._secret = secret
        self._nixl = nixl
        self._most_s = most_s
        self._servers: list[BlockServer] = []
        if host:
            self._servers.append(BlockServer(pool, host, secret))
            if nixl is not None:
                self._servers.append(NixlServer(nixl, host, secret))
        self._block_of = dict[bytes, BlockId]()
        self._lanes: dict[str, Lane] = {}  # by place
        self._ended: list[Lane] = []  # that may still be about to
        self._is_closed = False
        self._lock = threading.Lock()  # over the lanes, and whether copies may begin

    @property
    def address(self) -> str:
        return BETWEEN.join((self.pool.address, *(server.address for server in self._servers)))

    def publish(self, changes: Sequence[KvChange]) -> None:
        for change in changes:
            if isinstance(change, BlocksStored):
                for name, block_id in zip(change.names, change.block_ids, strict=True):
                    self._block_of[name] = block_id
                    self.pool.name_block(block_id, name)
            else:
                for name in change.names:
                    self.pool.forget_block(self._block_of.pop(name))

    def start(self, copy: StartCopy, on_done: OnCopyDone) -> None:
        with self._lock:
            if not self._is_closed:
                self._lane(copy.source).start(copy, on_done)
                return
        on_done(CopyDone(copy.copy_id, 0, ENDING))

    def close(self) -> None:
        """Waits for no copy, but for a lender that is just being called: so long as its patience.
        Idempotent.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            lanes = [*self._lanes.values(), *self._ended]
        for lane in lanes:
            lane.stop()
            lane.end()
        for server in self._servers:
            server.close()
        for lane in lanes:
            lane.join()
        if self._nixl is not None:
            self._nixl.close()
        self.pool.close()

    def _lane(self, place: str) -> Lane:
        lane = self._lanes.get(place)
        if lane is None:
            self._leave_dead()
            lane = self._lanes[place] = Lane(
                self.pool,
                partial(self._open, place),
                most_s=self._most_s,
                may_end=partial(self._may_end, place),
            )
        return lane

    def _leave_dead(self) -> None:
        """Mappings of pools whose owners are gone hold their memory."""
        self._ended = [lane for lane in self._ended if lane.is_alive]
        for place in [one for one in self._lanes if is_here(one) and not is_alive(one)]:
            lane = self._lanes.pop(place)
            lane.end()
            self._ended.append(lane)

    def _may_end(self, place: str, lane: Lane) -> bool:
        with self._lock:
            if self._is_closed or not lane.is_empty:
                return False
            if self._lanes.get(place) is lane:
                self._ended.append(self._lanes.pop(place))
            return True

    def _open(self, place: str) -> Source:
        """The nearest way to it."""
        addresses = place.split(BETWEEN)
        if is_here(place) or len(addresses) == 1:
            return SharedSource(addresses[0], self.pool.block_bytes)
        if self._nixl is not None and len(addresses) > 2:
            try:
                return NixlSource(addresses[2], self._nixl, self._secret)
            except TransferError as fault:
                if self._is_closed or isinstance(fault, StalledCopy):
                    raise  # it would not answer over TCP either
                _log.warning("KV comes over TCP instead: %s", fault)
        return TcpSource(addresses[1], self.pool.block_bytes, self._secret)
