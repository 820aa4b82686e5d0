"""KV between processes of one machine: pools in shared memory, which anyone may read.

A pool is a file without a name: first the name of what each block holds, 16 bytes a block, zeros
for what nobody may copy; then the blocks, from whole pages on. Its owner changes the name of a
block before it writes to it. Whoever copies a block looks at the name before and after, so it
never takes a block for what it was, or is going to be, whatever the owner does meanwhile or
however long the copier sleeps.
"""

import logging
import mmap
import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from headrace.adapters.movers.port import OnCopyDone
from headrace.core.base.errors import TransferError
from headrace.core.base.events import BlockRemoved, BlockStored, CopyDone, StartCopy
from headrace.core.base.types import BlockId
from headrace.core.kv.names import NAME_BYTES
from headrace.ops.interface import KvFile

_log = logging.getLogger(__name__)

_NOBODY = bytes(NAME_BYTES)


class SharedPool:
    """The memory of a worker's KV pool. `file` is for whoever computes with it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._offset = _blocks_offset(num_blocks)
        num_bytes = self._offset + num_blocks * block_bytes
        self._fd = os.memfd_create("headrace-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_bytes)
        self._memory = mmap.mmap(self._fd, num_bytes)
        self.file = KvFile(self._fd, self._offset)

    @property
    def address(self) -> str:
        """What `SharedMover` of another process on this machine reads it by."""
        return f"shm:{_machine()}:{os.getpid()}:{self._fd}:{self.num_blocks}:{self.block_bytes}"

    def name_block(self, block_id: BlockId, name: bytes) -> None:
        start = block_id * NAME_BYTES
        self._memory[start : start + NAME_BYTES] = name

    def forget_block(self, block_id: BlockId) -> None:
        self.name_block(block_id, _NOBODY)

    def write(self, block_id: BlockId, data: memoryview) -> None:
        start = self._offset + block_id * self.block_bytes
        self._memory[start : start + self.block_bytes] = data

    def close(self) -> None:
        """For whoever computes with it has a mapping of its own."""
        self._memory.close()
        os.close(self._fd)


class _Source:
    """Another worker's pool, to read. It stays readable when that worker is gone."""

    def __init__(self, address: str, block_bytes: int) -> None:
        """TransferError where there is no such pool, or its blocks are of another size."""
        try:
            kind, machine, *numbers = address.split(":")
            pid, fd, num_blocks, their_bytes = map(int, numbers)
        except ValueError:
            raise TransferError(f"{address!r} is no address of a pool") from None
        if kind != "shm" or their_bytes != block_bytes:
            raise TransferError(f"{address!r} is not a pool of blocks of {block_bytes} bytes")
        if machine != _machine():
            raise TransferError(f"{address!r} is on another machine")
        self._offset = _blocks_offset(num_blocks)
        self._block_bytes = block_bytes
        self._names_end = num_blocks * NAME_BYTES
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                num_bytes = self._offset + num_blocks * block_bytes
                if os.fstat(own).st_size != num_bytes:
                    raise TransferError(f"{address!r} has another size")
                self._memory = mmap.mmap(own, num_bytes, prot=mmap.PROT_READ)
            finally:
                os.close(own)
        except OSError as error:
            raise TransferError(f"{address!r} cannot be read: {error.strerror}") from error
        self._view = memoryview(self._memory)

    def find(self, name: bytes) -> int | None:
        """The block that has this name."""
        place = -1
        while (place := self._memory.find(name, place + 1, self._names_end)) >= 0:
            if place % NAME_BYTES == 0:
                return place // NAME_BYTES
        return None

    def copy(self, name: bytes, pool: SharedPool, block_id: BlockId) -> bool:
        """Whether the block was there all the time that it took to copy it."""
        index = self.find(name)
        if index is None:
            return False
        start = self._offset + index * self._block_bytes
        pool.write(block_id, self._view[start : start + self._block_bytes])
        return self._view[index * NAME_BYTES : (index + 1) * NAME_BYTES] == name

    def close(self) -> None:
        self._view.release()
        self._memory.close()


class SharedMover:
    """A Mover over a pool in shared memory. Copies run one after another on a thread of its own."""

    def __init__(self, pool: SharedPool) -> None:
        self.pool = pool
        self._block_of: dict[bytes, BlockId] = {}
        self._inbox: queue.SimpleQueue[tuple[StartCopy, OnCopyDone] | None] = queue.SimpleQueue()
        self._sources: dict[str, _Source] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="headrace-mover", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self.pool.address

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
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(None)
            self._thread.join()
            for source in self._sources.values():
                source.close()
            self.pool.close()

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            copy, on_done = work
            num_blocks, error = 0, "the worker is ending"
            try:
                if not self._is_closed:
                    num_blocks, error = self._copy(copy)
            except Exception as fault:
                error = str(fault)
                _log.warning("KV from another worker is computed here instead: %s", fault)
            on_done(CopyDone(copy.copy_id, num_blocks, error))

    def _copy(self, copy: StartCopy) -> tuple[int, str]:
        """How many blocks have come, and why no more."""
        source = self._sources.get(copy.source)
        if source is None:
            source = _Source(copy.source, self.pool.block_bytes)
            self._keep(copy.source, source)
        for count, (name, block_id) in enumerate(zip(copy.names, copy.block_ids, strict=True)):
            if not source.copy(name, self.pool, block_id):
                return count, "the source no longer has it"
        return len(copy.names), ""

    def _keep(self, address: str, source: _Source) -> None:
        """Mappings of pools whose owners are gone hold their memory: let go of these."""
        for other in [one for one in self._sources if not _is_alive(one)]:
            self._sources.pop(other).close()
        self._sources[address] = source


def _is_alive(address: str) -> bool:
    with suppress(OSError):
        os.stat(f"/proc/{address.split(':')[2]}")
        return True
    return False


@cache
def _machine() -> str:
    """Of this start of this machine, and no other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _blocks_offset(num_blocks: int) -> int:
    """Where the blocks begin: behind the names, at a whole page."""
    return -(-num_blocks * NAME_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
