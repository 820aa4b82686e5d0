"""A worker that goes to front ends on other machines, and comes again to each that is lost.

    headrace worker --connect HOST:PORT --secret-file FILE

Decides when to try again; what it serves is the front ends' choice.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Final, Never

from headrace.adapters.handshake import GREETING_BYTES, greeting, stream_secret
from headrace.cluster.shared import Occupied, SharedEngine
from headrace.cluster.wire import Hello
from headrace.cluster.worker import Service
from headrace.cluster.worker_line import WorkerLine
from headrace.core.base.errors import ConfigError, TransferError
from headrace.core.base.worker import Role
from headrace.live.boot import AsWorker

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 15.0  # between two attempts
DEAD_AFTER_MS: Final = 15_000  # of what is sent and not acknowledged, or silence on the wire


def address_of(text: str) -> tuple[str, int]:
    """HOST:PORT, [HOST]:PORT for IPv6. ConfigError for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65_535:
        raise ConfigError(f"{text!r} is no HOST:PORT", hint="for instance 10.0.0.5:7000")
    return host, int(port)


Address = tuple[str, int]


def serve_fronts(fronts: Sequence[Address], secret: bytes, *, role: Role, name: str) -> Never:
    """Serve whoever listens at these addresses, with one engine, for good. ConfigError where there
    is no front end left that wants this worker, or that it could serve.
    """
    hello = Hello(name=name, role=role)
    with closing(SharedEngine(AsWorker(secret=secret))) as engine:
        faults: SimpleQueue[ConfigError] = SimpleQueue()
        for front in fronts:
            link = Link(front, secret, hello, engine, faults.put)
            threading.Thread(target=link.run, name=f"headrace-front-{front}", daemon=True).start()
        for _ in fronts:
            fault = faults.get()
            _log.warning("one front end less to work for: %s", fault.message)
    raise fault


class Link:
    """The way to one front end, again and again. `give_up` hears why it does not try again."""

    def __init__(
        self,
        front: Address,
        secret: bytes,
        hello: Hello,
        engine: SharedEngine,
        give_up: Callable[[ConfigError], None],
    ) -> None:
        self._front = front
        self._secret = secret
        self._hello = hello
        self._engine = engine
        self._give_up = give_up
        self._delay_s = FIRST_DELAY_S
        self._was_configured = False

    def run(self) -> None:
        while True:
            self._was_configured = False
            why = ""
            try:
                self._serve()
            except ConfigError as error:
                self._give_up(error)
                return
            except Occupied as error:
                why = error.message
            except (EOFError, OSError, TransferError) as error:
                why = str(error)
            why = why or ("it is gone" if self._was_configured else "it hung up: same secret?")
            _log.warning("no front end at %s port %d: %s", *self._front, why)
            time.sleep(self._delay_s)
            self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    def _serve(self) -> None:
        with socket.create_connection(self._front, CONNECT_TIMEOUT_S) as stream:
            line = _greet(stream, self._secret)
            line.send(self._hello)
            # Other machines reach this one where the front end does.
            host = stream.getsockname()[0]
            Service(
                self._engine, line, kv_host=host, is_leased=True, on_configured=self._note
            ).run()

    def _note(self) -> None:
        self._was_configured, self._delay_s = True, FIRST_DELAY_S
        _log.warning("working for the front end at %s port %d", *self._front)


def _greet(stream: socket.socket, secret: bytes) -> WorkerLine:
    _notice_death(stream)
    ours = greeting()
    stream.sendall(ours)
    theirs = b""
    while len(theirs) < GREETING_BYTES:
        data = stream.recv(GREETING_BYTES - len(theirs))
        if not data:
            raise EOFError
        theirs += data
    stream.settimeout(None)
    return WorkerLine(stream, stream_secret(secret, theirs, ours))


def _notice_death(stream: socket.socket) -> None:
    """Of a machine that can no longer say that it is gone; where the system has these options."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_USER_TIMEOUT", DEAD_AFTER_MS),
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 2),
    ):
        number = getattr(socket, option, None)
        if number is not None:
            with suppress(OSError):
                stream.setsockopt(socket.IPPROTO_TCP, number, value)
