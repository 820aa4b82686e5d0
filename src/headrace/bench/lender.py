"""A worker's KV pool without the worker, and beside it the same bytes over a bare socket.

    python -m headrace.bench.lender NUM_BLOCKS BLOCK_BYTES [HOST]

Prints the pool's address and the port of the bare socket, and ends with its standard input. Whoever
connects to that port gets as many bytes as all blocks have for each letter that it sends, without
names or tags: for `ONE_BUFFER` all out of one that a cache keeps, for `BLOCKS` out of the pool.
"""

import socket
import sys
import threading
from contextlib import suppress

from headrace.adapters.movers.mover import PoolMover
from headrace.adapters.movers.pool import SharedPool
from headrace.core.base.events import BlocksStored
from headrace.core.base.types import BlockId
from headrace.core.kv.names import NAME_BYTES

SECRET = b"of a benchmark that nobody joins"
HOST = "127.0.0.1"
ONE_BUFFER, BLOCKS = b"1", b"b"


def name(index: int) -> bytes:
    return (index + 1).to_bytes(NAME_BYTES, "little")


def send_bare(listener: socket.socket, pool: SharedPool) -> None:
    while True:
        stream, _ = listener.accept()
        with stream, suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while asked := stream.recv(1):
                for index in range(pool.num_blocks):
                    # One of them, since the kernel copies whole pages best.
                    with pool.view(BlockId(0 if asked == ONE_BUFFER else index)) as block:
                        stream.sendall(block)


def main(num_blocks: int, block_bytes: int, host: str = HOST) -> None:
    mover = PoolMover(SharedPool(num_blocks, block_bytes), host=host, secret=SECRET)
    block = bytes(range(256)) * (block_bytes // 256)
    for index in range(num_blocks):
        mover.pool.write(BlockId(index), memoryview(block))
        mover.publish([BlocksStored((name(index),), bytes(NAME_BYTES), (BlockId(index),))])
    listener = socket.create_server((host, 0))
    threading.Thread(target=send_bare, args=(listener, mover.pool), daemon=True).start()
    print(mover.address, listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4])
