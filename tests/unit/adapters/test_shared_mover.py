"""Blocks are copied by name out of a pool that somebody else writes to, or they are not."""

import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from headrace.adapters.movers.shared import SharedMover, SharedPool, _Source
from headrace.core.base.errors import TransferError
from headrace.core.base.events import BlockRemoved, BlockStored, CopyDone, StartCopy
from headrace.core.base.types import BlockId

BLOCKS, BYTES = 300, 64  # the names take more than a page
ROOT = bytes(16)


def name(index: int) -> bytes:
    return bytes([index + 1]) * 16


def content(index: int) -> bytes:
    return bytes([index]) * BYTES


@pytest.fixture
def theirs() -> Iterator[SharedMover]:
    """Block 10 + i holds what name(i) says, for four of them."""
    with closing(SharedMover(SharedPool(BLOCKS, BYTES))) as mover:
        for index in range(4):
            block_id = BlockId(10 + index)
            mover.pool.write(block_id, memoryview(content(index)))
            mover.publish([BlockStored(name(index), ROOT, block_id)])
        yield mover


@pytest.fixture
def ours() -> Iterator[SharedMover]:
    with closing(SharedMover(SharedPool(BLOCKS + 7, BYTES))) as mover:
        yield mover


def copied(mover: SharedMover, source: str, *indices: int) -> CopyDone:
    done: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
    copy = StartCopy(
        copy_id=5,
        source=source,
        names=tuple(name(index) for index in indices),
        block_ids=tuple(BlockId(20 + place) for place in range(len(indices))),
    )
    mover.start(copy, done.put)
    end = done.get(timeout=10)
    assert end.copy_id == 5
    return end


def block(mover: SharedMover, block_id: int) -> bytes:
    file = mover.pool.file
    return os.pread(file.fd, BYTES, file.offset + block_id * BYTES)


def test_blocks_arrive_in_order_between_pools_of_unequal_size(
    theirs: SharedMover, ours: SharedMover
) -> None:
    assert copied(ours, theirs.address, 2, 0, 3) == CopyDone(5, 3)
    assert [block(ours, 20 + place) for place in range(3)] == [content(2), content(0), content(3)]


def test_a_copy_ends_before_the_first_block_that_is_not_there(
    theirs: SharedMover, ours: SharedMover
) -> None:
    theirs.publish([BlockRemoved(name(1))])
    end = copied(ours, theirs.address, 0, 1, 2)
    assert (end.num_blocks, end.error) == (1, "the source no longer has it")


def test_a_block_that_is_given_up_while_it_is_copied_does_not_count(theirs: SharedMover) -> None:
    pool = SharedPool(BLOCKS, BYTES)

    class Slow(SharedPool):
        """The owner takes the block back between the first byte and the last."""

        def __init__(self) -> None:
            pass

        def write(self, block_id: BlockId, data: memoryview) -> None:
            theirs.publish([BlockRemoved(name(0))])
            pool.write(block_id, data)

    with closing(_Source(theirs.address, BYTES)) as source, closing(pool):
        assert not source.copy(name(0), Slow(), BlockId(1))
        assert source.copy(name(1), pool, BlockId(1))


def test_a_name_across_two_names_is_none(theirs: SharedMover) -> None:
    theirs.publish([BlockStored(bytes(8) + b"\7" * 8, ROOT, BlockId(30))])
    theirs.publish([BlockStored(b"\7" * 8 + bytes(8), ROOT, BlockId(31))])
    with closing(_Source(theirs.address, BYTES)) as source:
        assert source.find(b"\7" * 16) is None
        assert source.find(name(2)) == 12


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda a: a.replace("shm", "tcp"), "is not a pool of blocks"),
        (lambda a: a.replace(":", ":x", 1), "is on another machine"),
        (lambda a: a.rsplit(":", 1)[0] + ":65", "is not a pool of blocks"),
        (lambda a: a.replace(f":{BLOCKS}:", ":9:"), "has another size"),
        (lambda a: a.replace(str(os.getpid()), "999999999"), "cannot be read: no such file"),
        (lambda a: "nonsense", "is no address"),
        (lambda a: "", "is no address"),
    ],
)
def test_what_is_no_pool_gives_nothing(
    theirs: SharedMover, ours: SharedMover, change: object, why: str
) -> None:
    end = copied(ours, change(theirs.address), 0)  # type: ignore[operator]
    assert end.num_blocks == 0
    assert why in end.error.lower()
    assert copied(ours, theirs.address, 0).num_blocks == 1


def test_a_pool_outlives_its_owner_for_those_who_read_it() -> None:
    script = (
        "from headrace.adapters.movers.shared import SharedPool\n"
        "pool = SharedPool(4, 64)\n"
        "pool.write(2, memoryview(bytes([9]) * 64)); pool.name_block(2, bytes([1]) * 16)\n"
        "print(pool.address, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        address = owner.stdout.readline().strip()
        with closing(_Source(address, 64)) as source, closing(SharedPool(2, 64)) as pool:
            owner.kill()
            owner.wait()
            assert source.copy(name(0), pool, BlockId(1))
            assert os.pread(pool.file.fd, 64, pool.file.offset + 64) == bytes([9]) * 64
        with pytest.raises(TransferError, match="cannot be read"):
            _Source(address, 64)


def test_closing_ends_what_waits(theirs: SharedMover) -> None:
    ours = SharedMover(SharedPool(BLOCKS, BYTES))
    ends: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
    for _ in range(50):
        ours.start(
            StartCopy(copy_id=1, source=theirs.address, names=(name(0),), block_ids=(BlockId(0),)),
            ends.put,
        )
    ours.close()
    ours.close()
    assert sum(1 for _ in range(50) if ends.get(timeout=1).copy_id == 1) == 50
