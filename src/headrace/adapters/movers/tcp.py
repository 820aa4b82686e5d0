"""KV between machines: blocks by their names, over a stream whose two ends know a secret.

Whoever wants blocks sends their names; whoever has them sends one block after another, and an empty
message before the first that it has not. Every message is authenticated and numbered, requests and
blocks alike (`adapters/frames.py`).
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from headrace.adapters.frames import HEADER_BYTES, FrameReader, FrameWriter, direction_key
from headrace.adapters.handshake import GREETING_BYTES, greeting, stream_secret
from headrace.adapters.liveness import notice_death
from headrace.adapters.movers import lane
from headrace.adapters.movers.lane import BrokenCopy, StalledCopy
from headrace.adapters.movers.pool import SharedPool
from headrace.core.base.errors import TransferError
from headrace.core.base.types import BlockId
from headrace.core.kv.names import NAME_BYTES

_log = logging.getLogger(__name__)

TO_LENDER, FROM_LENDER = "to lender", "from lender"  # directions of frames
MAX_NAMES: Final = 1 << 16  # of one request
# Of a lender: for the next bytes, and for all before any proof. Whoever borrows has STALL_S.
PATIENCE_S: Final = 5.0
MOMENT_S: Final = 0.001  # a socket with a timeout of 0 would not wait, which is another error
PART_BYTES: Final = 1 << 18  # that a core's cache keeps from their coming until they are checked
MORE: Final = getattr(socket, "MSG_MORE", 0)  # of send(2): the next bytes follow at once
MAX_STREAMS: Final = 64
RETRY_S: Final = 0.1


class BlockStream:
    """Framed messages over a connected socket, one after another; waits at most PATIENCE_S for
    anything, or until `until_s`, while that is given.
    """

    def __init__(
        self,
        stream: socket.socket,
        secret: bytes,
        sends: str,
        hears: str,
        *,
        until_s: float | None = None,
    ) -> None:
        self.until_s = until_s
        stream.settimeout(PATIENCE_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_death(stream)
        self.socket = stream
        ours = greeting()
        stream.sendall(ours)
        theirs = self._take(GREETING_BYTES)
        # Whoever lends greets first in the secret, so that both ends agree on it.
        pair = (ours, theirs)
        key = stream_secret(secret, *(pair if sends == FROM_LENDER else reversed(pair)))
        self._writer = FrameWriter(direction_key(key, sends))
        self._reader = FrameReader(direction_key(key, hears))

    def take_time(self) -> None:
        """Only the next bytes have to come soon from here on, however many there are."""
        self.until_s = None
        self.socket.settimeout(PATIENCE_S)

    def stop(self) -> None:
        """Whoever waits here for something has an error. From any thread."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(self, payload: bytes) -> None:
        self._pass_on(self._writer.header(payload), payload)

    def lend(self, block: memoryview, is_there: Callable[[], bool]) -> bool:
        """Send it out of the memory where it is; False, with nothing sent, where it is not there
        any more when its tag is computed. If it goes later, what is sent is not what the tag is of,
        and whoever receives it refuses it.
        """
        header = self._writer.header(block)
        if not is_there():
            self._writer.take_back()
            return False
        self._pass_on(header, block)
        return True

    def _pass_on(self, header: bytes, payload: bytes | memoryview) -> None:
        self._keep_to_time()
        # One segment where it fits: a header that comes alone wakes whoever waits for the rest.
        self.socket.sendall(header, MORE if payload else 0)
        self.socket.sendall(payload)

    def receive(self, most: int) -> bytes:
        """The next message. EOFError where there will be none, TransferError for what is none, or
        has more than `most` bytes.
        """
        length, tag = self._open()
        if length > most:
            raise TransferError(f"a message of {length} bytes has come where {most} may")
        payload = self._take(length)
        self._reader.check(tag, payload)
        return payload

    def receive_into(self, view: memoryview) -> bool:
        """The next message, of just as many bytes as the view has; False where it is empty. What
        was written counts for nothing if this raises; EOFError and TransferError as above.
        """
        length, tag = self._open()
        if length and length != len(view):
            raise TransferError(f"a block of {length} bytes has come")
        with view[:length] as message:
            patience_ms = math.ceil(self._patience_s * 1000)
            if not self._reader.receive(tag, self.socket.fileno(), message, patience_ms):
                self._reader.check_parts(tag, self._parts(view, length))
        return length > 0

    def _parts(self, view: memoryview, length: int) -> Iterator[memoryview]:
        """Of a message, as they come."""
        for start in range(0, length, PART_BYTES):
            with view[start : min(start + PART_BYTES, length)] as part:
                self._fill(part)
                yield part

    def _open(self) -> tuple[int, bytes]:
        return self._reader.open(self._take(HEADER_BYTES))

    def _take(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        fill(self.socket, view, self._keep_to_time)

    def _keep_to_time(self) -> None:
        if self.until_s is not None:
            self.socket.settimeout(self._patience_s)

    @property
    def _patience_s(self) -> float:
        if self.until_s is None:
            return PATIENCE_S
        return max(MOMENT_S, self.until_s - time.monotonic())


def fill(stream: socket.socket, view: memoryview, before: Callable[[], None] | None = None) -> None:
    """Receive as many bytes as the view has; `before` is called before each part of them. EOFError
    where the stream ends. Views are released at once: an error that somebody keeps must not keep a
    pool open.
    """
    start = 0
    while start < len(view):
        if before is not None:
            before()
        with view[start:] as rest:
            num_bytes = stream.recv_into(rest)
        if not num_bytes:
            raise EOFError
        start += num_bytes


class BlockServer:
    """Lends the blocks of a pool to whoever knows the secret, on threads of its own."""

    kind = "tcp"  # of its address

    def __init__(self, pool: SharedPool, host: str, secret: bytes) -> None:
        """Listens on a free port of `host`. OSError where it cannot."""
        self._pool = pool
        self._secret = secret
        self._listener = socket.create_server((host, 0), family=_family(host))
        self._streams: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._lock = threading.Lock()  # over the streams, and whether more may come
        threading.Thread(target=self._accept, name="headrace-lender", daemon=True).start()

    @property
    def address(self) -> str:
        """What a source of another machine reads it by."""
        host, port = self._listener.getsockname()[:2]
        return f"{self.kind}:{self._pool.block_bytes}:{port}:{host}"

    def close(self) -> None:
        """Nobody reads the pool from here on."""
        # A shutdown wakes whoever waits in accept, recv or send, which a close does not.
        with self._lock:
            self._is_closed = True
            threads = list(self._streams.values())
            streams = (self._listener, *self._streams)
        for stream in streams:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        until_s = time.monotonic() + PATIENCE_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _accept(self) -> None:
        is_in_trouble = False
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                if not is_in_trouble:
                    _log.warning("nobody can copy KV for now: %s", error)
                is_in_trouble = True
                time.sleep(RETRY_S)
                continue
            is_in_trouble = False
            with self._lock:
                is_too_many = self._is_closed or len(self._streams) >= MAX_STREAMS
                if not is_too_many:
                    thread = threading.Thread(target=self._serve, args=(stream,), daemon=True)
                    self._streams[stream] = thread
                    thread.start()
            if is_too_many:
                stream.close()

    def _serve(self, stream: socket.socket) -> None:
        with stream, suppress(EOFError, OSError):
            try:
                until_s = time.monotonic() + PATIENCE_S
                line = BlockStream(stream, self._secret, FROM_LENDER, TO_LENDER, until_s=until_s)
                while True:
                    names = line.receive(MAX_NAMES * NAME_BYTES)
                    line.take_time()  # it has shown that it knows the secret
                    if len(names) % NAME_BYTES:
                        raise TransferError(f"a request of {len(names)} bytes is none for blocks")
                    self._lend(line, names)
                    stream.settimeout(None)  # between two requests there may be hours
            except TransferError as error:
                _log.warning("somebody who may not copy KV has come: %s", error)
        with self._lock:
            self._streams.pop(stream)

    def _lend(self, line: BlockStream, names: bytes) -> None:
        for start in range(0, len(names), NAME_BYTES):
            if not self._lend_one(line, names[start : start + NAME_BYTES]):
                line.send(b"")
                return

    def _lend_one(self, line: BlockStream, name: bytes) -> bool:
        block_id = self._pool.find(name)
        if block_id is None:
            return False
        with self._pool.view(block_id) as block:
            return line.lend(block, lambda: self._pool.has(block_id, name))


class TcpSource:
    """Another machine's pool. One copy at a time."""

    def __init__(self, address: str, block_bytes: int, secret: bytes) -> None:
        """As `open_stream`."""
        self._line = open_stream(address, BlockServer.kind, block_bytes, secret)

    def copy(
        self,
        names: Sequence[bytes],
        pool: SharedPool,
        block_ids: Sequence[BlockId],
        until_s: float = math.inf,
    ) -> int:
        """As Source.copy. Each block has STALL_S, from the one before it on."""
        count = 0
        began_s = block_s = time.monotonic()
        try:
            self._line.until_s = min(block_s + lane.STALL_S, until_s)
            self._line.send(b"".join(names))
            while count < len(names):
                with pool.view(block_ids[count]) as block:
                    if not self._line.receive_into(block):
                        break
                count += 1
                block_s = time.monotonic()
                self._line.until_s = min(block_s + lane.STALL_S, until_s)
        except TimeoutError as error:
            raise late_copy(count, began_s, block_s, until_s) from error
        except (EOFError, OSError, TransferError) as error:
            raise BrokenCopy(count, str(error) or "the lender is gone") from error
        return count

    def stop(self) -> None:
        self._line.stop()

    def close(self) -> None:
        self._line.socket.close()


def late_copy(count: int, began_s: float, block_s: float, until_s: float) -> BrokenCopy:
    """Of so many blocks, of which the last came at `block_s`."""
    now_s = time.monotonic()
    if now_s >= until_s:
        return BrokenCopy(count, f"it takes too long, {count} blocks in {now_s - began_s:.2f} s")
    return StalledCopy(count, f"no block has come for {now_s - block_s:.3f} s")


def open_stream(address: str, kind: str, block_bytes: int, secret: bytes) -> BlockStream:
    """To a lender of this kind, which has STALL_S from here on, also for what is asked then, until
    another time is set. TransferError where there is no such pool, or its blocks are of another
    size; StalledCopy where nothing comes.
    """
    began_s = time.monotonic()
    until_s = began_s + lane.STALL_S
    try:
        its_kind, size, port, host = address.split(":", 3)
        if its_kind != kind or int(size) != block_bytes:
            raise TransferError(f"{address!r} is not a pool of blocks of {block_bytes} bytes")
        stream = socket.create_connection((host, int(port)), timeout=lane.STALL_S)
    except ValueError:
        raise TransferError(f"{address!r} is no address of a pool") from None
    except TimeoutError as error:
        raise _silent(address, began_s) from error
    except OSError as error:
        raise TransferError(f"{address!r} cannot be reached: {error}") from error
    try:
        return BlockStream(stream, secret, TO_LENDER, FROM_LENDER, until_s=until_s)
    except TimeoutError as error:
        stream.close()
        raise _silent(address, began_s) from error
    except (EOFError, OSError) as error:
        stream.close()
        raise TransferError(f"{address!r} does not answer") from error
    except TransferError:
        stream.close()
        raise


def _silent(address: str, began_s: float) -> StalledCopy:
    silence_s = time.monotonic() - began_s
    return StalledCopy(0, f"{address!r} does not answer: nothing has come for {silence_s:.3f} s")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
