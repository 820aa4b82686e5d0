"""Blocks are copied by name out of a pool that somebody else writes to, or they are not."""

import errno
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from headrace.adapters.frames import HEADER_BYTES, FrameWriter
from headrace.adapters.handshake import GREETING_BYTES, greeting
from headrace.adapters.movers.lane import BrokenCopy
from headrace.adapters.movers.mover import PoolMover
from headrace.adapters.movers.pool import SharedPool, SharedSource
from headrace.adapters.movers.tcp import MAX_STREAMS, BlockStream, TcpSource, open_stream
from headrace.core.base.errors import TransferError
from headrace.core.base.events import BlocksRemoved, BlocksStored
from headrace.core.base.types import BlockId
from support.kv_copies import BLOCKS, BYTES, ROOT, SECRET, content, copied, lend, name


@pytest.fixture
def theirs() -> Iterator[PoolMover]:
    with closing(PoolMover(SharedPool(BLOCKS, BYTES))) as mover:
        yield lend(mover)


@pytest.fixture
def ours() -> Iterator[PoolMover]:
    with closing(PoolMover(SharedPool(BLOCKS + 7, BYTES))) as mover:
        yield mover


@pytest.fixture
def far() -> Iterator[PoolMover]:
    """As `theirs`, for other machines too."""
    with closing(PoolMover(SharedPool(BLOCKS, BYTES), host="127.0.0.1", secret=SECRET)) as mover:
        yield lend(mover)


def from_afar(address: str) -> str:
    """As it looks from another machine."""
    return f"shm:elsewhere:1:2:3:4|{address.partition('|')[2]}"


def block(mover: PoolMover, block_id: int) -> bytes:
    file = mover.pool.file
    return os.pread(file.fd, BYTES, file.offset + block_id * BYTES)


def test_a_block_that_is_given_up_while_it_is_copied_does_not_count(theirs: PoolMover) -> None:
    pool = SharedPool(BLOCKS, BYTES)

    class Slow(SharedPool):
        """The owner takes the block back between the first byte and the last."""

        def __init__(self) -> None:
            pass

        def fill_from(self, block_id: BlockId, source: mmap.mmap, start: int) -> None:
            theirs.publish([BlocksRemoved((name(0),))])
            pool.fill_from(block_id, source, start)

    with closing(SharedSource(theirs.address, BYTES)) as source, closing(pool):
        assert source.copy([name(0)], Slow(), [BlockId(1)]) == 0
        assert source.copy([name(1)], pool, [BlockId(1)]) == 1


def test_a_name_across_two_names_is_none(theirs: PoolMover) -> None:
    theirs.publish([BlocksStored((bytes(8) + b"\7" * 8,), ROOT, (BlockId(30),))])
    theirs.publish([BlocksStored((b"\7" * 8 + bytes(8),), ROOT, (BlockId(31),))])
    assert theirs.pool.find(b"\7" * 16) is None
    found = theirs.pool.find(name(2))
    assert found is not None
    with theirs.pool.view(found) as block:
        assert block == content(2)


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
    theirs: PoolMover, ours: PoolMover, change: object, why: str
) -> None:
    end = copied(ours, change(theirs.address), 0)  # type: ignore[operator]
    assert end.num_blocks == 0
    assert why in end.error.lower()
    assert copied(ours, theirs.address, 0).num_blocks == 1


def test_a_pool_outlives_its_owner_for_those_who_read_it() -> None:
    script = (
        "from headrace.adapters.movers.pool import SharedPool\n"
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
        with closing(SharedSource(address, 64)) as source, closing(SharedPool(2, 64)) as pool:
            owner.kill()
            owner.wait()
            assert source.copy([name(0)], pool, [BlockId(1)]) == 1
            assert os.pread(pool.file.fd, 64, pool.file.offset + 64) == bytes([9]) * 64
        with pytest.raises(TransferError, match="cannot be read"):
            SharedSource(address, 64)


def test_only_to_those_who_know_the_secret(far: PoolMover) -> None:
    with closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=b"another secret..")) as stranger:
        end = copied(stranger, from_afar(far.address), 0)
        assert (end.num_blocks, block(stranger, 20)) == (0, bytes(BYTES))
    with closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)) as ours:
        assert copied(ours, from_afar(far.address), 0).num_blocks == 1


def test_a_block_that_its_owner_takes_back_before_it_is_sent_does_not_come(
    far: PoolMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream goes on."""
    header = FrameWriter.header
    takes_back = [True]

    def slow(writer: FrameWriter, payload: bytes | memoryview) -> bytes:
        if len(payload) == BYTES and takes_back.pop():
            far.publish([BlocksRemoved((name(1),))])
        return header(writer, payload)

    with closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)) as ours:
        assert copied(ours, from_afar(far.address), 0, 2).num_blocks == 2
        takes_back[:] = [False, True, False]
        monkeypatch.setattr(FrameWriter, "header", slow)
        end = copied(ours, from_afar(far.address), 0, 1, 2)
        assert (end.num_blocks, end.error) == (1, "the source no longer has it")
        assert copied(ours, from_afar(far.address), 0).num_blocks == 1


def test_one_that_changes_while_it_is_sent_is_refused(
    far: PoolMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_on = BlockStream._pass_on
    index = far.pool.find(name(1))
    assert index is not None

    def late(stream: BlockStream, header: bytes, payload: bytes | memoryview) -> None:
        if payload == content(1):
            far.pool.write(index, memoryview(content(5)))
        pass_on(stream, header, payload)

    monkeypatch.setattr(BlockStream, "_pass_on", late)
    with closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)) as ours:
        end = copied(ours, from_afar(far.address), 0, 1, 2)
        assert (end.num_blocks, end.error) == (1, "frame 1 is not authentic")


def test_a_lender_can_close_while_somebody_takes_his_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is sent is the pool's own memory."""
    num_bytes, is_sending = 16 << 20, threading.Event()
    pass_on = BlockStream._pass_on

    def noted(stream: BlockStream, header: bytes, payload: bytes | memoryview) -> None:
        if len(payload) == num_bytes:
            is_sending.set()
        pass_on(stream, header, payload)

    monkeypatch.setattr(BlockStream, "_pass_on", noted)
    mover = PoolMover(SharedPool(1, num_bytes), host="127.0.0.1", secret=SECRET)
    mover.publish([BlocksStored((name(0),), ROOT, (BlockId(0),))])
    line = open_stream(mover.address.partition("|")[2], "tcp", num_bytes, SECRET)
    with line.socket:
        line.send(name(0) * 9)  # more than sockets hold
        assert is_sending.wait(10)
        mover.close()


def at_one_port(monkeypatch: pytest.MonkeyPatch) -> Callable[[], PoolMover]:
    """Lenders at the same address, one after another."""
    create, ports = socket.create_server, [0]

    def at_port(where: tuple[str, int], **options: Any) -> socket.socket:
        listener = create((where[0], ports[0]), **options)
        ports[0] = listener.getsockname()[1]
        return listener

    monkeypatch.setattr(socket, "create_server", at_port)
    return lambda: PoolMover(SharedPool(BLOCKS, BYTES), host="127.0.0.1", secret=SECRET)


def test_a_lender_that_goes_is_found_again_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the same address, where it has other blocks under the same ids."""
    lender_of = at_one_port(monkeypatch)
    with closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)) as ours:
        gone = lender_of()
        gone.pool.write(BlockId(1), memoryview(content(0)))
        gone.publish([BlocksStored((name(0),), ROOT, (BlockId(1),))])
        address = from_afar(gone.address)
        assert copied(ours, address, 0).num_blocks == 1
        gone.close()
        end = copied(ours, address, 0)
        assert end.num_blocks == 0
        assert end.error
        end = copied(ours, address, 0)
        assert "cannot be reached" in end.error
        with closing(lender_of()) as again:
            assert from_afar(again.address).split("|")[1] == address.split("|")[1]
            again.pool.write(BlockId(1), memoryview(content(9)))
            again.publish([BlocksStored((name(9),), ROOT, (BlockId(1),))])
            end = copied(ours, address, 0)
            assert (end.num_blocks, end.error) == (0, "the source no longer has it")
            assert block(ours, 20) == content(0)  # as it was copied before
            assert copied(ours, address, 9).num_blocks == 1
            assert block(ours, 20) == content(9)


def test_one_that_comes_back_between_hand_shake_and_copy_lends_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has spoken to the one before it takes nothing from the other for that one's."""
    lender_of = at_one_port(monkeypatch)
    gone = lender_of()
    address = gone.address.partition("|")[2]
    with (
        closing(SharedPool(BLOCKS, BYTES)) as pool,
        closing(TcpSource(address, BYTES, SECRET)) as source,
    ):
        gone.close()
        with closing(lend(lender_of())) as again:
            assert again.address.partition("|")[2] == address
            with pytest.raises(BrokenCopy) as caught:
                source.copy([name(0)], pool, [BlockId(20)])
            assert caught.value.num_blocks == 0
            with closing(TcpSource(address, BYTES, SECRET)) as fresh:
                assert fresh.copy([name(0)], pool, [BlockId(20)]) == 1


def through_a_liar(port: int, place: int) -> socket.socket:
    """A listener that carries one stream to `port`, with one bit of the answer changed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, sink: socket.socket, place: int) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if 0 <= place < len(data):
                    data[place] ^= 1
                place -= len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with listener.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
            asking = threading.Thread(target=carry, args=(near, far, -1))
            asking.start()
            carry(far, near, place)
            asking.join()

    threading.Thread(target=serve, daemon=True).start()
    return listener


@pytest.mark.parametrize(
    ("place", "num_blocks"),
    [(0, 0), (GREETING_BYTES, 0), (GREETING_BYTES + HEADER_BYTES, 0)]
    + [(GREETING_BYTES + HEADER_BYTES + BYTES + at, 1) for at in (0, 4, HEADER_BYTES, 60)],
)
def test_a_block_with_a_wrong_bit_does_not_count(
    far: PoolMover, place: int, num_blocks: int
) -> None:
    """Nor does what comes after it, be the bit in the greeting, a length, a tag or a block."""
    where = far.address.split("|tcp:")[1].split(":")[1]
    with closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)) as ours:
        with through_a_liar(int(where), place) as liar:
            address = from_afar(far.address).replace(where, str(liar.getsockname()[1]))
            end = copied(ours, address, 0, 1, 2)
        assert end.num_blocks == num_blocks
        assert end.error
        assert [block(ours, 20 + at) for at in range(num_blocks)] == [content(0)][:num_blocks]
        assert copied(ours, from_afar(far.address), 0, 1, 2).num_blocks == 3


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"", b"\0" * 99])
def test_a_lender_minds_nobody_who_speaks_another_language(far: PoolMover, data: bytes) -> None:
    port = int(far.address.split("tcp:")[1].split(":")[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stream, suppress(OSError):
        stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(1000):
            pass
    with closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)) as ours:
        assert copied(ours, from_afar(far.address), 0).num_blocks == 1


@pytest.mark.parametrize("pause_s", [None, 0.1])
def test_strangers_do_not_keep_others_from_a_lender(
    far: PoolMover, pause_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they say nothing behind their greeting, or very little at a time."""
    monkeypatch.setattr("headrace.adapters.movers.tcp.PATIENCE_S", 0.5)
    port = int(far.address.split("tcp:")[1].split(":")[1])
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(MAX_STREAMS)
        ]
        for stranger in strangers:
            stranger.sendall(greeting())
            assert len(stranger.recv(GREETING_BYTES, socket.MSG_WAITALL)) == GREETING_BYTES
        left = list(strangers)
        while left:
            heard, _, _ = select.select(left, [], [], pause_s)
            left = [stranger for stranger in left if stranger not in heard]
            for stranger in left:
                with suppress(OSError):
                    stranger.send(b"\0")
        with closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)) as ours:
            assert copied(ours, from_afar(far.address), 0).num_blocks == 1


def test_whoever_has_copied_may_come_again_later(
    far: PoolMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.adapters.movers.tcp.PATIENCE_S", 0.2)
    with closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)) as ours:
        for _ in range(2):
            assert copied(ours, from_afar(far.address), 2).num_blocks == 1
            time.sleep(0.5)


def test_a_lender_that_could_not_take_somebody_takes_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.adapters.movers.tcp.RETRY_S", 0.01)
    accept = socket.socket.accept
    faults = [OSError(errno.EMFILE, "too many open files"), ConnectionAbortedError()]

    def scarce(listener: socket.socket) -> object:
        if faults:
            raise faults.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with (
        closing(PoolMover(SharedPool(BLOCKS, BYTES), host="127.0.0.1", secret=SECRET)) as lender,
        closing(PoolMover(SharedPool(BLOCKS, BYTES), secret=SECRET)) as ours,
    ):
        lender.publish([BlocksStored((name(0),), ROOT, (BlockId(1),))])
        assert copied(ours, from_afar(lender.address), 0).num_blocks == 1
        assert not faults
        assert len(caplog.records) == 1  # it says so once
