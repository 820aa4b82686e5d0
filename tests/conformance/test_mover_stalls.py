"""A lender that is stopped, or gives a little at a time, costs its own copies a moment, and those
of others nothing.
"""

import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import pytest

from conformance.test_mover import HOST, copied, mover, ours, place, theirs, way
from headrace.adapters.movers.mover import PoolMover
from headrace.core.base.events import CopyDone, StartCopy
from headrace.core.base.types import BlockId
from support.kv_copies import BYTES, lend, name
from support.lag import measured_lag

__all__ = ["ours", "theirs", "way"]  # fixtures

TESTS = Path(__file__).parents[1]
LENDER = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from conformance.test_mover import *
lender = lend(mover(sys.argv[1]))
print(place(sys.argv[1], lender), flush=True)
input()
"""
Ends: TypeAlias = "queue.SimpleQueue[CopyDone]"


@contextmanager
def lender_process(way: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """What copies call it, and itself."""
    with subprocess.Popen(
        [sys.executable, "-c", LENDER, way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def begin(borrower: PoolMover, source: str, copy_id: int, ends: Ends, num: int = 1) -> None:
    names = tuple(name(index % 4) for index in range(num))
    block_ids = tuple(BlockId(20 + place) for place in range(num))
    copy = StartCopy(copy_id=copy_id, source=source, names=names, block_ids=block_ids)
    borrower.start(copy, ends.put)


@pytest.mark.parametrize("has_copied", [True, False])
def test_a_lender_that_stops_ends_its_copies_within_the_second(
    way: str, ours: PoolMover, has_copied: bool
) -> None:
    """Also those that wait behind the first. In memory of this machine blocks are there anyway."""
    ends: Ends = queue.SimpleQueue()
    with lender_process(way) as (source, lender):
        if has_copied:
            assert copied(ours, source, 0).num_blocks == 1
        lender.send_signal(signal.SIGSTOP)
        with measured_lag() as lag:
            begin_s = time.monotonic()
            for copy_id in range(5):
                begin(ours, source, copy_id, ends)
            found = [ends.get(timeout=30) for _ in range(5)]
            took_s = time.monotonic() - begin_s
        assert [end.copy_id for end in found] == [0, 1, 2, 3, 4]
        if way == "memory":
            assert all(end.num_blocks == 1 for end in found)
            return
        assert all((end.num_blocks, bool(end.error)) == (0, True) for end in found)
        assert took_s <= 1.0 + lag.forgiven_s
        lender.send_signal(signal.SIGCONT)
        assert copied(ours, source, 0).num_blocks == 1


def test_nobody_waits_for_what_another_lender_does_not_send(
    way: str, theirs: PoolMover, ours: PoolMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.adapters.movers.lane.STALL_S", 3.0)
    ends: Ends = queue.SimpleQueue()
    with lender_process(way) as (source, lender):
        lender.send_signal(signal.SIGSTOP)
        begin(ours, source, 1, ends)
        begin(ours, place(way, theirs), 2, ends)
        first, second = (ends.get(timeout=30) for _ in range(2))
    if way != "memory":
        assert (first.copy_id, first.num_blocks) == (2, 1)
        assert (second.copy_id, second.num_blocks) == (1, 0)


@pytest.fixture
def far() -> Iterator[PoolMover]:
    with closing(mover("tcp")) as lender:
        yield lend(lender)


@pytest.fixture
def near() -> Iterator[PoolMover]:
    with closing(mover("tcp")) as borrower:
        yield borrower


@contextmanager
def dribbling(far: PoolMover, send: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """A place where what the lender says is passed on as `send` does it."""
    port = int(far.address.split("|tcp:")[1].split(":")[1])
    listener = socket.create_server((HOST, 0))
    sockets: list[socket.socket] = [listener]
    threads: list[threading.Thread] = []

    def carry(source: socket.socket, sink: socket.socket, pass_on: Callable[..., None]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                pass_on(sink, data)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near = listener.accept()[0]
                sockets.append(near)
                lender = socket.create_connection((HOST, port))
                sockets.append(lender)
                for pair in ((near, lender, socket.socket.sendall), (lender, near, send)):
                    threads.append(threading.Thread(target=carry, args=pair))
                    threads[-1].start()

    serving = threading.Thread(target=serve)
    serving.start()
    yield f"shm:elsewhere:1:2:3:4|tcp:{BYTES}:{listener.getsockname()[1]}:{HOST}"
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
    for thread in (serving, *threads):
        thread.join()
    for one in sockets:
        one.close()


def slowly(pause_s: float, num_bytes: int) -> Callable[[socket.socket, bytes], None]:
    """The greeting at once, and then so many bytes at a time."""
    greeted: set[socket.socket] = set()

    def send(sink: socket.socket, data: bytes) -> None:
        if sink not in greeted:
            greeted.add(sink)
            sink.sendall(data)
            return
        for start in range(0, len(data), num_bytes):
            time.sleep(pause_s)
            sink.sendall(data[start : start + num_bytes])

    return send


def test_bytes_now_and_then_are_no_block(far: PoolMover, near: PoolMover) -> None:
    """A byte every 50 ms would take four seconds for each block, for ever."""
    ends: Ends = queue.SimpleQueue()
    with dribbling(far, slowly(0.05, 1)) as source, measured_lag() as lag:
        begin_s = time.monotonic()
        begin(near, source, 1, ends, num=100)
        end = ends.get(timeout=30)
        took_s = time.monotonic() - begin_s
    assert end.num_blocks == 0
    (silence_s,) = re.findall(r"no block has come for ([0-9.]+) s", end.error)
    assert 0.7 <= float(silence_s) <= took_s <= 1.0 + lag.forgiven_s


def test_nor_are_blocks_now_and_then_a_copy(
    far: PoolMover, near: PoolMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes in time, and all of them would take a minute. Whoever waits behind it goes on."""
    monkeypatch.setattr("headrace.adapters.movers.lane.STALL_S", 1.0)
    monkeypatch.setattr("headrace.adapters.movers.lane.LEAST_BYTES_PER_S", 100 * BYTES)
    ends: Ends = queue.SimpleQueue()
    with dribbling(far, slowly(0.5, 20 + BYTES)) as source, measured_lag() as lag:
        begin_s = time.monotonic()
        begin(near, source, 1, ends, num=120)
        begin(near, source, 2, ends)
        end = ends.get(timeout=60)
        took_s = time.monotonic() - begin_s
        after = ends.get(timeout=30)
    assert "it takes too long" in end.error
    assert 0 < end.num_blocks < 10
    assert 3.2 <= took_s <= 3.2 + 0.5 + lag.forgiven_s  # what it may take, and a block
    assert after == CopyDone(2, 1)


def test_a_copy_never_outlives_the_lease(far: PoolMover, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its size allows."""
    monkeypatch.setattr("headrace.adapters.movers.lane.LEAST_BYTES_PER_S", 1)
    ends: Ends = queue.SimpleQueue()
    with (
        closing(mover("tcp", most_s=1.0)) as borrower,
        dribbling(far, slowly(0.3, 20 + BYTES)) as source,
    ):
        begin(borrower, source, 1, ends, num=100)
        end = ends.get(timeout=30)
    assert "it takes too long" in end.error
    assert end.num_blocks < 10


def test_a_place_of_which_nothing_is_asked_for_long_is_left_alone_and_found_again(
    way: str, theirs: PoolMover, ours: PoolMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.adapters.movers.lane.IDLE_S", 0.05)
    source = place(way, theirs)
    for _ in range(2):
        assert copied(ours, source, 0).num_blocks == 1
        (lane,) = ours._lanes.values()
        lane.join()
        assert not ours._lanes
