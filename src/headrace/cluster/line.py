"""A stream of framed messages that never waits: the front end's end of a worker's line."""

import socket
from contextlib import suppress
from typing import Final

from headrace.adapters.frames import MAX_FRAME_BYTES, FrameReader, FrameWriter, direction_key
from headrace.cluster.wire import (
    FROM_WORKER,
    TO_WORKER,
    FromWorker,
    ToWorker,
    decode_from_worker,
    encode,
)
from headrace.core.base.errors import TransferError

MAX_UNSENT_BYTES: Final = 256 << 20
_CHUNK_BYTES: Final = 1 << 18


class Line:
    """Takes over a connected stream; `secret` is what both ends know."""

    def __init__(
        self, stream: socket.socket, secret: bytes, first_most: int = MAX_FRAME_BYTES
    ) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._writer = FrameWriter(direction_key(secret, TO_WORKER))
        self._reader = FrameReader(direction_key(secret, FROM_WORKER), first_most)
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called when `fileno` can be written."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """Readable when `receive` has something to give."""
        return self._stream.fileno()

    def send(self, message: ToWorker) -> None:
        """TransferError where the worker does not read."""
        self._unsent += self._writer.frame(encode(message))
        self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            raise TransferError(f"the worker has left {len(self._unsent)} bytes unread")

    def flush(self) -> None:
        # A worker that is gone is found by whoever reads.
        with suppress(OSError):
            while self._unsent:
                num_sent = self._stream.send(self._unsent)
                del self._unsent[:num_sent]

    def receive(self) -> list[FromWorker]:
        """What has come. EOFError where the worker has ended, TransferError for what is none of
        ours.
        """
        payloads: list[bytes] = []
        data = None
        while data is None or len(data) == _CHUNK_BYTES:
            try:
                data = self._stream.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                raise EOFError from None
            if not data:
                if payloads:
                    break  # its last words first
                raise EOFError
            payloads += self._reader.feed(data)
        return [decode_from_worker(payload) for payload in payloads]

    def close(self) -> None:
        self._stream.close()
