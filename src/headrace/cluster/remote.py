"""A worker that goes to a front end on another machine, and comes again when that is lost.

    headrace worker --connect HOST:PORT --secret-file FILE

Decides when to try again; what it serves is the front end's choice.
"""

import logging
import socket
import time
from contextlib import suppress
from typing import Final, Never

from headrace.adapters.handshake import GREETING_BYTES, greeting, stream_secret
from headrace.cluster.wire import Hello
from headrace.cluster.worker import WorkerLine, serve
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


def serve_front(host: str, port: int, secret: bytes, *, role: Role, name: str) -> Never:
    """Serve whoever listens there, for good. ConfigError where the front end does not want this
    worker, or it cannot serve.
    """
    delay_s = FIRST_DELAY_S
    was_configured = False

    def note() -> None:
        nonlocal was_configured, delay_s
        was_configured, delay_s = True, FIRST_DELAY_S
        _log.warning("working for the front end at %s port %d", host, port)

    while True:
        was_configured = False
        try:
            with socket.create_connection((host, port), CONNECT_TIMEOUT_S) as stream:
                line = _greet(stream, secret)
                line.send(Hello(name=name, role=role))
                # Other machines reach this one where the front end does.
                serve(line, on_configured=note, as_worker=AsWorker(stream.getsockname()[0], secret))
        except (EOFError, OSError, TransferError) as error:
            why = str(error) or ("it is gone" if was_configured else "it hung up: same secret?")
            _log.warning("no front end at %s port %d: %s", host, port, why)
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


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
