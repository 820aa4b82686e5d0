"""PoolMover: the Mover over a pool in shared memory, for others on this machine and beyond.

Decides which of a source's addresses to use; refuses to know which blocks are worth copying.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Protocol

from headrace.adapters.movers.nixl import NixlAgent, NixlServer, NixlSource
from headrace.adapters.movers.pool import SharedPool, SharedSource, is_alive, is_here
from headrace.adapters.movers.port import OnCopyDone
from headrace.adapters.movers.tcp import BlockServer, BrokenCopy, TcpSource
from headrace.core.base.errors import TransferError
from headrace.core.base.events import BlockRemoved, BlockStored, CopyDone, StartCopy
from headrace.core.base.types import BlockId

_log = logging.getLogger(__name__)

BETWEEN = "|"  # addresses of one place


class Source(Protocol):
    def copy(
        self, names: Sequence[bytes], pool: SharedPool, block_ids: Sequence[BlockId]
    ) -> int: ...

    def stop(self) -> None:
        """A copy that is under way ends soon, and no other begins. From any thread."""
        ...

    def close(self) -> None: ...


class PoolMover:
    """Copies run one after another on a thread of its own. With a `host` and a `secret`, workers of
    other machines may copy from here, and this one from them, also through NIXL where both have an
    agent. OSError where that host cannot be listened at.
    """

    def __init__(
        self,
        pool: SharedPool,
        *,
        host: str = "",
        secret: bytes = b"",
        nixl: NixlAgent | None = None,
    ) -> None:
        self.pool = pool
        self._secret = secret
        self._nixl = nixl
        self._servers: list[BlockServer] = []
        if host:
            self._servers.append(BlockServer(pool, host, secret))
            if nixl is not None:
                self._servers.append(NixlServer(nixl, host, secret))
        self._block_of: dict[bytes, BlockId] = {}
        self._inbox: queue.SimpleQueue[tuple[StartCopy, OnCopyDone] | None] = queue.SimpleQueue()
        self._sources: dict[str, Source] = {}
        self._is_closed = False
        self._lock = threading.Lock()  # over the sources, and whether copies may begin
        self._thread = threading.Thread(target=self._run, name="headrace-mover", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return BETWEEN.join((self.pool.address, *(server.address for server in self._servers)))

    def publish(self, changes: Sequence[BlockStored | BlockRemoved]) -> None:
        for change in changes:
            if isinstance(change, BlockStored):
                self._block_of[change.name] = change.block_id
                self.pool.name_block(change.block_id, change.name)
            else:
                self.pool.forget_block(self._block_of.pop(change.name))

    def start(self, copy: StartCopy, on_done: OnCopyDone) -> None:
        self._inbox.put((copy, on_done))

    def close(self) -> None:
        """Waits for no copy, but for a lender that is just being called: so long as its patience.
        Idempotent.
        """
        if not self._is_closed:
            with self._lock:
                self._is_closed = True
                for source in self._sources.values():
                    source.stop()
            for server in self._servers:
                server.close()
            self._inbox.put(None)
            self._thread.join()
            for source in self._sources.values():
                source.close()
            if self._nixl is not None:
                self._nixl.close()
            self.pool.close()

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            copy, on_done = work
            num_blocks, error = 0, "the worker is ending"
            try:
                if not self._is_closed:
                    num_blocks = self._copy(copy)
                    is_whole = num_blocks == len(copy.names)
                    error = "" if is_whole else "the source no longer has it"
            except Exception as fault:
                if isinstance(fault, BrokenCopy):
                    num_blocks = fault.num_blocks
                error = str(fault)
                _log.warning("KV from another worker is computed here instead: %s", fault)
            on_done(CopyDone(copy.copy_id, num_blocks, error))

    def _copy(self, copy: StartCopy) -> int:
        source = self._sources.get(copy.source)
        if source is None:
            source = self._open(copy.source)
            with self._lock:
                self._sources[copy.source] = source
                if self._is_closed:
                    source.stop()
        try:
            return source.copy(copy.names, self.pool, copy.block_ids)
        except TransferError:
            self._drop(copy.source)
            raise

    def _drop(self, place: str) -> None:
        with self._lock:  # so that nobody stops what is closed
            source = self._sources.pop(place)
        source.close()

    def _open(self, place: str) -> Source:
        """The nearest way to it."""
        # Mappings of pools whose owners are gone hold their memory: let go of these.
        for other in [one for one in self._sources if is_here(one) and not is_alive(one)]:
            self._drop(other)
        addresses = place.split(BETWEEN)
        if is_here(place) or len(addresses) == 1:
            return SharedSource(addresses[0], self.pool.block_bytes)
        if self._nixl is not None and len(addresses) > 2:
            try:
                return NixlSource(addresses[2], self._nixl, self._secret)
            except TransferError as fault:
                if self._is_closed:
                    raise
                _log.warning("KV comes over TCP instead: %s", fault)
        return TcpSource(addresses[1], self.pool.block_bytes, self._secret)
