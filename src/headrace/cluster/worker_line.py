"""A worker's end of the stream to a front end.

Decides when a front end has been silent, or deaf, for too long; refuses to make the engine wait for
it, since there may be others.
"""

import logging
import socket
import threading
import time
from contextlib import suppress
from typing import Final

from headrace.adapters.frames import FrameReader, FrameWriter, direction_key
from headrace.cluster.line import MAX_UNSENT_BYTES
from headrace.cluster.wire import (
    FROM_WORKER,
    TO_WORKER,
    FromWorker,
    ToWorker,
    decode_to_worker,
    encode,
)

_log = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 1 << 18
_DONT_WAIT: Final = getattr(socket, "MSG_DONTWAIT", 0)  # where it is missing, sends may wait


class WorkerLine:
    """Takes over a connected stream. Any thread may send; one receives."""

    def __init__(self, stream: socket.socket, secret: bytes) -> None:
        self._stream = stream
        self._writer = FrameWriter(direction_key(secret, FROM_WORKER))
        self._reader = FrameReader(direction_key(secret, TO_WORKER))
        self._sending = threading.Lock()  # over all that follows
        self._unsent = bytearray()
        self._is_pushing = False  # a thread sends on what the stream had no room for
        self._is_cut = False
        self._heard_s = time.monotonic()

    @property
    def silence_s(self) -> float:
        """How long nothing has come."""
        return time.monotonic() - self._heard_s

    def send(self, message: FromWorker) -> None:
        """Never waits. OSError where the front end is gone, or leaves too much unread."""
        payload = encode(message)
        with self._sending:
            if self._is_cut:
                raise BrokenPipeError("the line was cut")
            self._unsent += self._writer.frame(payload)
            if self._is_pushing:
                self._check_backlog()
                return
            with suppress(BlockingIOError):
                del self._unsent[: self._stream.send(self._unsent, _DONT_WAIT)]
            if self._unsent:
                self._is_pushing = True
                threading.Thread(target=self._push, name="headrace-push", daemon=True).start()

    def _check_backlog(self) -> None:
        if len(self._unsent) > MAX_UNSENT_BYTES:
            _log.warning("a front end does not read; it is left alone")
            self._cut()

    def _push(self) -> None:
        """Send what was left, as fast as the front end reads."""
        while True:
            with self._sending:
                chunk = bytes(self._unsent[:_CHUNK_BYTES])
                if not chunk or self._is_cut:
                    self._is_pushing = False
                    return
            try:
                num_sent = self._stream.send(chunk)
            except OSError:
                self.cut()
                continue
            with self._sending:
                del self._unsent[:num_sent]

    def receive(self) -> list[ToWorker]:
        """What has come, after waiting for it. EOFError where the front end is gone."""
        data = self._stream.recv(_CHUNK_BYTES)
        if not data:
            raise EOFError
        self._heard_s = time.monotonic()
        return [decode_to_worker(payload) for payload in self._reader.feed(data)]

    def cut(self) -> None:
        """Nothing comes and goes here any more; whoever receives finds the end. Idempotent."""
        with self._sending:
            self._cut()

    def _cut(self) -> None:
        self._is_cut = True
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
