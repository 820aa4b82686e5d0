"""KV between processes of one machine: pools in shared memory, which anyone may read.

A pool is a file without a name: first the name of what each block holds, 16 bytes a block, zeros
for what nobody may copy; then the blocks, from whole pages on. Its owner changes the name of a
block before it writes to it. Whoever copies a block looks at the name before and after, so it
never takes a block for what it was, or is going to be, whatever the owner does meanwhile or
however long the copier sleeps.
"""

import math
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from headrace.core.base.errors import TransferError
from headrace.core.base.types import BlockId
from headrace.core.kv.names import NAME_BYTES
from headrace.ops.interface import KvFile
from headrace.ops.native import _native

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
        """What a SharedSource in another process on this machine reads it by."""
        return f"shm:{this_machine()}:{os.getpid()}:{self._fd}:{self.num_blocks}:{self.block_bytes}"

    def name_block(self, block_id: BlockId, name: bytes) -> None:
        start = block_id * NAME_BYTES
        self._memory[start : start + NAME_BYTES] = name

    def forget_block(self, block_id: BlockId) -> None:
        self.name_block(block_id, _NOBODY)

    def write(self, block_id: BlockId, data: memoryview) -> None:
        start = self._offset + block_id * self.block_bytes
        self._memory[start : start + self.block_bytes] = data

    def fill_from(self, block_id: BlockId, source: mmap.mmap, start: int) -> None:
        """Write what is there in another mapping. Other threads go on meanwhile."""
        own = self._offset + block_id * self.block_bytes
        _native.copy_range(self._memory, own, source, start, self.block_bytes)

    def view(self, block_id: BlockId) -> memoryview:
        """The block itself, to be written to; to be released before the pool can close."""
        start = self._offset + block_id * self.block_bytes
        return memoryview(self._memory)[start : start + self.block_bytes]

    def find(self, name: bytes) -> BlockId | None:
        """The block that has this name now."""
        index = _find(self._memory, name, self.num_blocks)
        return None if index is None else BlockId(index)

    def has(self, block_id: BlockId, name: bytes) -> bool:
        """Whether it still has the name by which it was found, and so had it all the time."""
        return _has(self._memory, block_id, name)

    def close(self) -> None:
        """For whoever computes with it has a mapping of its own."""
        self._memory.close()
        os.close(self._fd)


class SharedSource:
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
        if machine != this_machine():
            raise TransferError(f"{address!r} is on another machine")
        self._offset = _blocks_offset(num_blocks)
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._is_stopped = False
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

    def copy(
        self,
        names: Sequence[bytes],
        pool: SharedPool,
        block_ids: Sequence[BlockId],
        until_s: float = math.inf,
    ) -> int:
        """How many blocks have come, from the first one on. It waits for nobody, so the time that
        it has is not asked for.
        """
        for count, (name, block_id) in enumerate(zip(names, block_ids, strict=True)):
            index = _find(self._memory, name, self._num_blocks)
            if index is None or self._is_stopped:
                return count
            start = self._offset + index * self._block_bytes
            pool.fill_from(block_id, self._memory, start)
            if not _has(self._memory, index, name):
                return count
        return len(names)

    def stop(self) -> None:
        self._is_stopped = True

    def close(self) -> None:
        self._memory.close()


def is_here(address: str) -> bool:
    """Whether the pool is on this machine."""
    return address.startswith(f"shm:{this_machine()}:")


def is_alive(address: str) -> bool:
    """Whether the owner of a pool on this machine still runs."""
    with suppress(OSError):
        os.stat(f"/proc/{address.split(':')[2]}")
        return True
    return False


@cache
def this_machine() -> str:
    """Of this start of this machine, and no other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _find(memory: mmap.mmap, name: bytes, num_blocks: int) -> int | None:
    """The block that has this name."""
    place = -1
    while (place := memory.find(name, place + 1, num_blocks * NAME_BYTES)) >= 0:
        if place % NAME_BYTES == 0:
            return place // NAME_BYTES
    return None


def _has(memory: mmap.mmap, index: int, name: bytes) -> bool:
    return memory[index * NAME_BYTES : (index + 1) * NAME_BYTES] == name


def _blocks_offset(num_blocks: int) -> int:
    """Where the blocks begin: behind the names, at a whole page."""
    return -(-num_blocks * NAME_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
