"""A KV pool of named blocks, and copies out of it."""

import queue

from headrace.adapters.movers.mover import PoolMover
from headrace.core.base.events import BlocksStored, CopyDone, StartCopy
from headrace.core.base.types import BlockId

BLOCKS, BYTES = 300, 64  # the names take more than a page
ROOT = bytes(16)
SECRET = b"sixteen letters!"


def name(index: int) -> bytes:
    return bytes([index + 1]) * 16


def content(index: int) -> bytes:
    return bytes([index]) * BYTES


def lend(lender: PoolMover) -> PoolMover:
    """Block 10 + i holds what name(i) says, for four of them."""
    for index in range(4):
        block_id = BlockId(10 + index)
        lender.pool.write(block_id, memoryview(content(index)))
        lender.publish([BlocksStored((name(index),), ROOT, (block_id,))])
    return lender


def copied(borrower: PoolMover, source: str, *indices: int, within_s: float = 10) -> CopyDone:
    """The end of a copy of these, into blocks 20, 21, ..."""
    done: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
    copy = StartCopy(
        copy_id=5,
        source=source,
        names=tuple(name(index) for index in indices),
        block_ids=tuple(BlockId(20 + place) for place in range(len(indices))),
    )
    borrower.start(copy, done.put)
    end = done.get(timeout=within_s)
    assert end.copy_id == 5
    return end
