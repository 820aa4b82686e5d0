"""Copies out of one place, one after another, on a thread of their own.

Decides what becomes of those that wait behind one that hangs; refuses to know how blocks come.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from headrace.adapters.movers.pool import SharedPool
from headrace.adapters.movers.port import OnCopyDone
from headrace.core.base.errors import TransferError
from headrace.core.base.events import CopyDone, StartCopy
from headrace.core.base.types import BlockId

_log = logging.getLogger(__name__)

# Without a block for so long, a copy has ended. A lender only ever sends what it has computed, and
# from threads that compute nothing, so however slow it computes, it is not this slow to answer.
STALL_S: Final = 0.75
LEAST_BYTES_PER_S: Final = 5e6  # of a whole copy, beside two such pauses
IDLE_S: Final = 60.0  # after which a place is left alone
NO_WAY_S: Final = 0.05  # likewise, where the way to it is broken
ENDING: Final = "the worker is ending"


class BrokenCopy(TransferError):
    """A copy that ended early; what came before is right."""

    def __init__(self, num_blocks: int, message: str) -> None:
        super().__init__(message)
        self.num_blocks = num_blocks


class StalledCopy(BrokenCopy):
    """The lender has not answered for STALL_S: it is stopped, or the way to it is cut."""


class Source(Protocol):
    def copy(
        self,
        names: Sequence[bytes],
        pool: SharedPool,
        block_ids: Sequence[BlockId],
        until_s: float,
    ) -> int:
        """How many blocks have come, from the first one on, before that time of the monotonic
        clock. TransferError where that broke: it is of no more use.
        """
        ...

    def stop(self) -> None:
        """A copy that is under way ends soon, and no other begins. From any thread."""
        ...

    def close(self) -> None: ...


class Lane:
    """Opens its source when it is needed, and closes it in the end.

    `most_s` bounds a copy, whatever its size. `may_end` is asked when nothing has been to do for
    IDLE_S. All public methods may be called from any thread.
    """

    def __init__(
        self,
        pool: SharedPool,
        open_source: Callable[[], Source],
        *,
        most_s: float,
        may_end: Callable[["Lane"], bool],
    ) -> None:
        self._pool = pool
        self._open_source = open_source
        self._most_s = most_s
        self._may_end = may_end
        self._inbox: queue.SimpleQueue[tuple[StartCopy, OnCopyDone] | None] = queue.SimpleQueue()
        self._source: Source | None = None
        self._is_stopped = False
        self._lock = threading.Lock()  # over the source, and whether copies may begin
        self._thread = threading.Thread(target=self._run, name="headrace-mover", daemon=True)
        self._thread.start()

    @property
    def is_empty(self) -> bool:
        return self._inbox.empty()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, copy: StartCopy, on_done: OnCopyDone) -> None:
        self._inbox.put((copy, on_done))

    def end(self) -> None:
        """After all that was started. Nothing may be started from here on."""
        self._inbox.put(None)

    def stop(self) -> None:
        """End what is under way, and begin nothing more."""
        with self._lock:
            self._is_stopped = True
            if self._source is not None:
                self._source.stop()

    def join(self) -> None:
        self._thread.join()

    # ---- its own thread

    def _run(self) -> None:
        while True:
            try:
                work = self._inbox.get(timeout=NO_WAY_S if self._source is None else IDLE_S)
            except queue.Empty:
                if self._may_end(self):
                    break
                continue
            if work is None:
                break
            self._do(*work)
        if self._source is not None:
            self._source.close()

    def _do(self, copy: StartCopy, on_done: OnCopyDone) -> None:
        num_blocks, error, is_stalled = 0, ENDING, False
        try:
            if not self._is_stopped:
                num_blocks = self._copy(copy)
                error = "" if num_blocks == len(copy.names) else "the source no longer has it"
        except Exception as fault:
            if isinstance(fault, BrokenCopy):
                num_blocks = fault.num_blocks
            is_stalled = isinstance(fault, StalledCopy)
            error = str(fault)
            _log.warning("KV from another worker is computed here instead: %s", fault)
        on_done(CopyDone(copy.copy_id, num_blocks, error))
        if is_stalled:
            self._end_waiting(error)

    def _copy(self, copy: StartCopy) -> int:
        source = self._source
        if source is None:
            source = self._open_source()
            with self._lock:
                self._source = source
                if self._is_stopped:
                    source.stop()
        num_bytes = len(copy.names) * self._pool.block_bytes
        longest_s = min(self._most_s, 2 * STALL_S + num_bytes / LEAST_BYTES_PER_S)
        try:
            return source.copy(copy.names, self._pool, copy.block_ids, time.monotonic() + longest_s)
        except TransferError:
            with self._lock:  # so that nobody stops what is closed
                self._source = None
            source.close()
            raise

    def _end_waiting(self, error: str) -> None:
        """Those who wait behind it have waited for the same answer."""
        with suppress(queue.Empty):
            while True:
                work = self._inbox.get_nowait()
                if work is None:
                    self._inbox.put(None)
                    return
                copy, on_done = work
                on_done(CopyDone(copy.copy_id, 0, ENDING if self._is_stopped else error))
