"""What every way of KV does: whole blocks by their names, in order, or an end that says why not."""

import os
import queue
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from headrace.adapters import frames
from headrace.adapters.movers.mover import BETWEEN, PoolMover
from headrace.adapters.movers.nixl import NixlAgent, NixlMissing, bindings
from headrace.adapters.movers.pool import SharedPool
from headrace.core.base.events import BlocksRemoved, BlocksStored, CopyDone, StartCopy
from headrace.core.base.types import BlockId
from support import kv_copies
from support.kv_copies import BLOCKS, BYTES, ROOT, SECRET, content, lend, name

HOST = "127.0.0.1"
copied = partial(kv_copies.copied, within_s=30)
TESTS = Path(__file__).parents[1]
WAYS = ("memory", "tcp", "tcp by a slow hash", "nixl")


def mover(
    way: str, num_blocks: int = BLOCKS, block_bytes: int = BYTES, *, most_s: float = 10.0
) -> PoolMover:
    pool = SharedPool(num_blocks, block_bytes)
    nixl = NixlAgent(pool, "lo") if way == "nixl" else None
    host = "" if way == "memory" else HOST
    return PoolMover(pool, host=host, secret=SECRET, nixl=nixl, most_s=most_s)


def place(way: str, lender: PoolMover) -> str:
    """As whoever has to go that way calls it."""
    _, *others = lender.address.split(BETWEEN)
    return lender.address if way == "memory" else BETWEEN.join(("shm:elsewhere:1:2:3:4", *others))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    way: str = request.param
    if way == "tcp by a slow hash":  # as on a processor without the instructions of the other
        monkeypatch.setattr(frames._Tags, "_own_hash", lambda tags: None)
    if way == "nixl":
        try:
            bindings()
        except NixlMissing as fault:
            pytest.skip(fault.message)
    return way


@pytest.fixture
def theirs(way: str) -> Iterator[PoolMover]:
    with closing(mover(way)) as lender:
        yield lend(lender)


@pytest.fixture
def ours(way: str) -> Iterator[PoolMover]:
    with closing(mover(way, BLOCKS + 7)) as borrower:
        yield borrower


def blocks(borrower: PoolMover, num_blocks: int) -> list[bytes]:
    file = borrower.pool.file
    return [
        os.pread(file.fd, BYTES, file.offset + (20 + place) * BYTES) for place in range(num_blocks)
    ]


def test_blocks_arrive_in_order_between_pools_of_unequal_size(
    way: str, theirs: PoolMover, ours: PoolMover
) -> None:
    for _ in range(3):
        assert copied(ours, place(way, theirs), 2, 0, 3) == CopyDone(5, 3)
        assert blocks(ours, 3) == [content(2), content(0), content(3)]


@pytest.mark.parametrize("block_bytes", [48, 4096, 368_641, 2 << 20])
def test_blocks_of_any_size_come_as_they_are(way: str, block_bytes: int) -> None:
    """Below, at and beyond what is taken in one piece, and wherever they begin in memory."""
    rng = random.Random(block_bytes)
    blocks = [rng.randbytes(block_bytes) for _ in range(3)]
    with (
        closing(mover(way, 4, block_bytes)) as lender,
        closing(mover(way, 24, block_bytes)) as borrower,
    ):
        for index, block in enumerate(blocks):
            lender.pool.write(BlockId(index + 1), memoryview(block))
            lender.publish([BlocksStored((name(index),), ROOT, (BlockId(index + 1),))])
        assert copied(borrower, place(way, lender), 2, 0, 1) == CopyDone(5, 3)
        for at, index in enumerate((2, 0, 1)):
            with borrower.pool.view(BlockId(20 + at)) as come:
                assert come == blocks[index]
        with borrower.pool.view(BlockId(19)) as before, borrower.pool.view(BlockId(23)) as behind:
            assert not any(before)
            assert not any(behind)


def test_a_copy_ends_before_the_first_block_that_is_not_there(
    way: str, theirs: PoolMover, ours: PoolMover
) -> None:
    theirs.publish([BlocksRemoved((name(1),))])
    end = copied(ours, place(way, theirs), 0, 1, 2)
    assert (end.num_blocks, end.error) == (1, "the source no longer has it")
    assert blocks(ours, 3) == [content(0), bytes(BYTES), bytes(BYTES)]
    assert copied(ours, place(way, theirs), 1).num_blocks == 0
    assert copied(ours, place(way, theirs), 3).num_blocks == 1


def test_both_lend_to_each_other(way: str, theirs: PoolMover, ours: PoolMover) -> None:
    ours.pool.write(BlockId(3), memoryview(content(9)))
    ours.publish([BlocksStored((name(9),), ROOT, (BlockId(3),))])
    assert copied(theirs, place(way, ours), 9).num_blocks == 1
    assert blocks(theirs, 1) == [content(9)]
    assert copied(ours, place(way, theirs), 1).num_blocks == 1


@pytest.mark.parametrize("source", ["", "nonsense", "shm:a:1:2:3:4|tcp:64:1:127.0.0.1|nixl:64:1:x"])
def test_where_nobody_is_nothing_comes(ours: PoolMover, source: str) -> None:
    end = copied(ours, source, 0)
    assert end.num_blocks == 0
    assert end.error


def test_a_lender_that_dies_takes_nothing_with_it(way: str, ours: PoolMover) -> None:
    """What it had is not there any more, but where it lies in memory of this machine."""
    script = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "from conformance.test_mover import *\n"
        "lender = mover(sys.argv[1])\n"
        "lender.pool.write(BlockId(1), memoryview(content(0)))\n"
        "lender.publish([BlocksStored((name(0),), ROOT, (BlockId(1),))])\n"
        "print(place(sys.argv[1], lender), flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as lender:
        assert lender.stdout is not None
        source = lender.stdout.readline().strip()
        assert copied(ours, source, 0).num_blocks == 1
        lender.kill()
        lender.wait()
    end = copied(ours, source, 0)
    assert end.num_blocks == (way == "memory")
    assert bool(end.error) == (way != "memory")


def test_closing_ends_what_waits(way: str, theirs: PoolMover) -> None:
    borrower = mover(way)
    ends: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
    for _ in range(50):
        borrower.start(
            StartCopy(
                copy_id=1, source=place(way, theirs), names=(name(0),), block_ids=(BlockId(0),)
            ),
            ends.put,
        )
    borrower.close()
    borrower.close()
    assert sum(1 for _ in range(50) if ends.get(timeout=1).copy_id == 1) == 50
