"""A worker's process as the front end sees it: what was sent, what came, whether it still runs."""

import socket
import subprocess
import sys
from contextlib import suppress
from typing import Final, Protocol

from headrace.cluster.frames import FrameReader, FrameWriter, direction_key
from headrace.cluster.wire import (
    FROM_WORKER,
    TO_WORKER,
    FromWorker,
    ToWorker,
    decode_from_worker,
    encode,
)
from headrace.core.base.errors import TransferError
from headrace.core.config.units import size_text

MAX_UNSENT_BYTES: Final = 256 << 20
_CHUNK_BYTES: Final = 1 << 18


class WorkerProcess(Protocol):
    """One start of a worker."""

    @property
    def pid(self) -> int: ...

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called when `fileno` can be written."""
        ...

    def fileno(self) -> int:
        """Readable when `receive` has something to give."""
        ...

    def send(self, message: ToWorker) -> None:
        """TransferError where the worker does not read."""
        ...

    def flush(self) -> None: ...

    def receive(self) -> list[FromWorker]:
        """What has come. EOFError where it has ended, TransferError for what is none of ours."""
        ...

    def close(self) -> None:
        """Let it end by itself: what it reads is at an end. Idempotent."""
        ...

    def kill(self) -> None:
        """End it at once, whatever it does, also where it is stopped. Idempotent."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time. The only call that may take time."""
        ...

    def exit_status(self) -> str | None:
        """How it has ended, for people; None while it runs."""
        ...


class LocalProcess:
    """A WorkerProcess on this machine, over a pair of sockets that nobody else can reach."""

    def __init__(self) -> None:
        self._stream, theirs = socket.socketpair()
        self._stream.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.cluster.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._writer = FrameWriter(direction_key(b"", TO_WORKER))
        self._reader = FrameReader(direction_key(b"", FROM_WORKER))
        self._unsent = bytearray()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._stream.fileno()

    def send(self, message: ToWorker) -> None:
        self._unsent += self._writer.frame(encode(message))
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise TransferError(f"the worker has not read {size_text(len(self._unsent))}")

    def flush(self) -> None:
        # A worker that is gone is found by whoever reads.
        with suppress(BlockingIOError, OSError):
            while self._unsent:
                num_sent = self._stream.send(self._unsent)
                del self._unsent[:num_sent]

    def receive(self) -> list[FromWorker]:
        payloads: list[bytes] = []
        with suppress(BlockingIOError):
            while True:
                try:
                    data = self._stream.recv(_CHUNK_BYTES)
                except ConnectionError:
                    raise EOFError from None
                if not data:
                    if payloads:
                        break  # its last words first
                    raise EOFError
                payloads += self._reader.feed(data)
                if len(data) < _CHUNK_BYTES:
                    break
        return [decode_from_worker(payload) for payload in payloads]

    def close(self) -> None:
        self._stream.close()

    def kill(self) -> None:
        self._stream.close()
        with suppress(ProcessLookupError):
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_status(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"signal {-code}"
        return f"exit code {code}"
