"""Where workers of other machines come in: greets whoever connects, admits who knows the secret.

Decides who is a worker; refuses to read anything from others, or to wait for them.
"""

import logging
import socket
import time
from collections.abc import Iterator
from typing import Final

from headrace.adapters.handshake import GREETING_BYTES, greeting, stream_secret
from headrace.cluster.process import RemoteProcess
from headrace.cluster.wire import Configure, Hello, OtherProtocol
from headrace.core.base.errors import TransferError
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.schema import Config

_log = logging.getLogger(__name__)

MAX_GUESTS: Final = 64  # that have not proved anything yet
MAX_HELLO_BYTES: Final = 4096  # nobody has to keep more for them
PATIENCE_S: Final = 10.0
REST_NS: Final = Ns(NS_PER_S // 2)  # when nobody can be let in, as without a free descriptor


class Guest:
    """Somebody who has connected."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._ours = greeting()
        self._theirs = b""
        self._process: RemoteProcess | None = None
        self.until_s = time.monotonic() + PATIENCE_S
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.send(self._ours)  # fits into any socket's buffer

    def fileno(self) -> int:
        return self._stream.fileno()

    def listen(self, secret: bytes) -> tuple[RemoteProcess, Hello] | None:
        """The worker that it is, once its first frame has shown that it knows the secret. EOFError,
        TransferError and OSError where it is none.
        """
        if self._process is None:
            data = self._stream.recv(GREETING_BYTES - len(self._theirs))
            if not data:
                raise EOFError
            self._theirs += data
            if len(self._theirs) < GREETING_BYTES:
                return None
            secret = stream_secret(secret, self._ours, self._theirs)
            self._process = RemoteProcess(self._stream, secret, MAX_HELLO_BYTES)
        messages = self._process.receive()
        if not messages:
            return None
        if len(messages) > 1 or not isinstance(messages[0], Hello):
            raise TransferError("a worker has to say hello, and then to listen")
        return self._process, messages[0]

    def refuse(self) -> None:
        """To a worker of another version: it reads why in the stamp of a configuration."""
        assert self._process is not None
        self._process.send(Configure(config=Config()))

    def close(self) -> None:
        self._stream.close()


class Door:
    """Owns a listening socket."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._guests: list[Guest] = []
        self._rests_until_ns = Ns(0)
        self._is_in_trouble = False

    def fileno(self) -> int:
        return self._listener.fileno()

    def __iter__(self) -> Iterator[Guest]:
        return iter(self._guests)

    def rests_until(self, now: Ns) -> Ns | None:
        """None = it hears who comes. Those who come meanwhile are let in afterwards."""
        return self._rests_until_ns if now < self._rests_until_ns else None

    def accept(self, now: Ns) -> None:
        """Greet whoever has come; beyond MAX_GUESTS the oldest has to go."""
        try:
            stream, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # whoever it was has left
        except OSError as error:
            # The listener stays readable: without a rest, its thread would do nothing else.
            self._rests_until_ns = Ns(now + REST_NS)
            if not self._is_in_trouble:
                _log.error("no worker can come in for now: %s", error.strerror)
            self._is_in_trouble = True
            return
        self._is_in_trouble = False
        try:
            self._guests.append(Guest(stream))
        except OSError:
            stream.close()
            return
        if len(self._guests) > MAX_GUESTS:
            self._guests.pop(0).close()

    def listen(self, guest: Guest) -> tuple[RemoteProcess, Hello] | None:
        """The worker that somebody who has said something turns out to be."""
        try:
            worker = guest.listen(self._secret)
        except BlockingIOError:
            return None
        except OtherProtocol as error:
            _log.warning("a worker of another version is refused: %s", error.message)
            guest.refuse()
            self._show_out(guest)
            return None
        except (EOFError, TransferError, OSError) as error:
            _log.warning(
                "somebody who is no worker has come (or one with another secret): %s",
                str(error) or "gone",
            )
            self._show_out(guest)
            return None
        if worker is not None:
            self._guests.remove(guest)
        return worker

    def close_late(self) -> None:
        """Those who have had long enough."""
        now_s = time.monotonic()
        for guest in [guest for guest in self._guests if guest.until_s < now_s]:
            self._show_out(guest)

    def _show_out(self, guest: Guest) -> None:
        self._guests.remove(guest)
        guest.close()

    def close(self) -> None:
        self._listener.close()
        for guest in self._guests:
            guest.close()
