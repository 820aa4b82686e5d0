"""A mover can close at once, whatever its copies wait for."""

import mmap
import queue
import socket
import threading
import time
from contextlib import closing, suppress

import pytest

from headrace.adapters.frames import HEADER_BYTES
from headrace.adapters.handshake import GREETING_BYTES
from headrace.adapters.movers.mover import PoolMover
from headrace.adapters.movers.pool import SharedPool
from headrace.core.base.events import CopyDone, StartCopy
from headrace.core.base.types import BlockId
from support.kv_copies import BLOCKS, BYTES, SECRET, lend, name


def start_copy(copy_id: int, source: str, names: tuple[bytes, ...]) -> StartCopy:
    block_ids = tuple(BlockId(20 + place) for place in range(len(names)))
    return StartCopy(copy_id=copy_id, source=source, names=names, block_ids=block_ids)


def through_a_tease(port: int, num_bytes: int) -> tuple[socket.socket, threading.Event]:
    """A listener that carries one stream to `port`. After so many bytes of the answer one comes at
    a time, seldom, for ever; the event is set when it has come to that.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    is_teasing = threading.Event()

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def serve() -> None:
        with listener.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
            threading.Thread(target=carry, args=(near, far), daemon=True).start()
            with suppress(OSError):
                for _ in range(num_bytes):
                    near.sendall(far.recv(1))
                is_teasing.set()
                while data := far.recv(1):
                    time.sleep(0.05)
                    near.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return listener, is_teasing


@pytest.mark.parametrize("num_bytes", [0, GREETING_BYTES, GREETING_BYTES + HEADER_BYTES + 9])
def test_a_borrower_can_close_while_a_lender_takes_its_time(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it in the greeting, in a header or in a block: each byte comes soon, and all never."""
    monkeypatch.setattr("headrace.adapters.movers.tcp.PATIENCE_S", 1.0)
    monkeypatch.setattr("headrace.adapters.movers.lane.STALL_S", 60.0)
    done: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
    names = tuple(name(at % 3) for at in range(200))
    ours = PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)
    far = lend(PoolMover(SharedPool(BLOCKS, BYTES), host="127.0.0.1", secret=SECRET))
    where = far.address.split("|tcp:")[1].split(":")[1]
    tease, is_teasing = through_a_tease(int(where), num_bytes)
    with closing(far), tease, closing(ours):
        address = f"shm:elsewhere:1:2:3:4|tcp:{BYTES}:{tease.getsockname()[1]}:127.0.0.1"
        for copy_id in (1, 2):
            ours.start(start_copy(copy_id, address, names), done.put)
        assert is_teasing.wait(10)
        begin_s = time.monotonic()
        ours.close()
        assert time.monotonic() - begin_s < 3.0
    ends = [done.get(timeout=1) for _ in range(2)]
    assert [end.copy_id for end in ends] == [1, 2]
    assert ends[0].error
    assert ends[1].error == "the worker is ending"


def test_a_borrower_that_closes_ends_a_copy_within_its_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: queue.SimpleQueue[CopyDone] = queue.SimpleQueue()
    fill_from, num_filled, is_copying = SharedPool.fill_from, 0, threading.Event()

    def slow(pool: SharedPool, block_id: BlockId, source: mmap.mmap, start: int) -> None:
        nonlocal num_filled
        num_filled += 1
        is_copying.set()
        time.sleep(0.05)
        fill_from(pool, block_id, source, start)

    monkeypatch.setattr(SharedPool, "fill_from", slow)
    with closing(PoolMover(SharedPool(BLOCKS, BYTES))) as theirs:
        ours = PoolMover(SharedPool(BLOCKS, BYTES))
        ours.start(start_copy(1, lend(theirs).address, (name(0),) * 200), done.put)
        assert is_copying.wait(10)
        ours.close()
    end = done.get(timeout=1)
    assert 0 < end.num_blocks == num_filled < 200
    assert end.error
