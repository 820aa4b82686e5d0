"""What moving KV between workers reaches of what the machine could do.

Another process lends its blocks; they are copied here by each way in turn: out of its memory, and
over TCP as from another machine. Beside each stands what it cannot be faster than: a copy within
memory, and the same bytes read from a bare socket, which has one stream as well and asks nothing:
once sent out of one buffer, as iperf does, and once out of the blocks themselves.
"""

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from statistics import median

import msgspec

from headrace.adapters.movers.mover import BETWEEN
from headrace.adapters.movers.pool import SharedPool, SharedSource
from headrace.adapters.movers.tcp import TcpSource
from headrace.bench.lender import BLOCKS, HOST, ONE_BUFFER, SECRET, name
from headrace.core.base.errors import HeadraceError
from headrace.core.base.types import BlockId

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 256
NUM_ROUNDS = 9


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way that KV goes. Rates are medians, and so is the share, of rounds in turns."""

    way: str
    gb_per_s: float
    limit: str
    limit_gb_per_s: float
    share: float


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    block_bytes: int
    num_blocks: int
    ways: list[Way]


def measure_transfer() -> TransferReport:
    with (
        _lender() as (address, port),
        closing(SharedPool(NUM_BLOCKS, BLOCK_BYTES)) as pool,
    ):
        shared, remote = address.split(BETWEEN)

        block = bytes(BLOCK_BYTES)
        with closing(SharedSource(shared, BLOCK_BYTES)) as memory:
            ways = _compared(
                "shared memory",
                lambda: _take(memory, pool),
                {"memcpy": lambda: _fill(pool, block)},
            )
        ways += measure_tcp(remote, (HOST, port), pool)
    return TransferReport(block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS, ways=ways)


def measure_tcp(
    lender: str, bare: tuple[str, int], pool: SharedPool, num_rounds: int = NUM_ROUNDS
) -> list[Way]:
    """From a lender's address, beside the same bytes from its bare socket."""
    with (
        socket.create_connection(bare, timeout=10) as stream,
        closing(TcpSource(lender, BLOCK_BYTES, SECRET)) as tcp,
    ):
        stream.settimeout(None)  # so that the kernel waits for whole blocks
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 10, 0))
        return _compared(
            "TCP",
            lambda: _take(tcp, pool),
            {
                "bare socket": lambda: _read_bare(stream, ONE_BUFFER, pool),
                "bare socket, same blocks": lambda: _read_bare(stream, BLOCKS, pool),
            },
            num_rounds,
        )


def _take(source: SharedSource | TcpSource, pool: SharedPool) -> None:
    names = [name(index) for index in range(NUM_BLOCKS)]
    block_ids = [BlockId(index) for index in range(NUM_BLOCKS)]
    if source.copy(names, pool, block_ids) != NUM_BLOCKS:
        raise HeadraceError("blocks did not come")


def _compared(
    way: str,
    work: Callable[[], None],
    limits: dict[str, Callable[[], None]],
    num_rounds: int = NUM_ROUNDS,
) -> list[Way]:
    rounds = []
    for turn in range(num_rounds + 1):
        rates = _rate(work), *(_rate(bare) for bare in limits.values())
        if turn:  # the first one touches memory for the first time
            rounds.append(rates)
    return [
        Way(
            way=way,
            gb_per_s=median(rates[0] for rates in rounds),
            limit=limit,
            limit_gb_per_s=median(rates[place] for rates in rounds),
            share=median(rates[0] / rates[place] for rates in rounds),
        )
        for place, limit in enumerate(limits, start=1)
    ]


def _rate(work: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    work()
    return NUM_BLOCKS * BLOCK_BYTES / (time.perf_counter() - start_s) / 1e9


def _fill(pool: SharedPool, block: bytes) -> None:
    """From one block that stays in a cache: only writing costs, so it is a limit of any copy."""
    view = memoryview(block)
    for index in range(NUM_BLOCKS):
        pool.write(BlockId(index), view)


def _read_bare(stream: socket.socket, which: bytes, pool: SharedPool) -> None:
    stream.sendall(which)
    for index in range(NUM_BLOCKS):
        with pool.view(BlockId(index)) as block:
            # One call for each block, as the mover makes: it is not beaten by a slow reader.
            if stream.recv_into(block, flags=socket.MSG_WAITALL) != len(block):
                raise HeadraceError("the bare socket has ended")


@contextmanager
def _lender() -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "headrace.bench.lender", str(NUM_BLOCKS), str(BLOCK_BYTES)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            address, _, port = process.stdout.readline().rpartition(" ")
            if not address:
                raise HeadraceError("the process that lends blocks did not start")
            yield address, int(port)
        finally:
            process.kill()
