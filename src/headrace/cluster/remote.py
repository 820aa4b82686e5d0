"""A worker that goes to front ends on other machines, and comes again to each that is lost.

    headrace worker --connect HOST:PORT --secret-file FILE

Decides when to try again, and when to leave; what it serves is the front ends' choice.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Final

import msgspec

from headrace.adapters.handshake import GREETING_BYTES, greeting, stream_secret
from headrace.adapters.liveness import notice_death
from headrace.cluster.shared import SharedEngine
from headrace.cluster.wire import Hello, Leave
from headrace.cluster.worker import Service
from headrace.cluster.worker_line import WorkerLine
from headrace.core.base.errors import ConfigError, HeadraceError
from headrace.core.base.worker import Role
from headrace.live.boot import AsWorker

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 15.0  # between two attempts
GRACE_S: Final = 5.0  # beyond the time that it leaves in


def address_of(text: str) -> tuple[str, int]:
    """HOST:PORT, [HOST]:PORT for IPv6. ConfigError for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65_535:
        raise ConfigError(f"{text!r} is no HOST:PORT", hint="for instance 10.0.0.5:7000")
    return host, int(port)


Address = tuple[str, int]


class Leaving:
    """What SIGTERM and SIGINT mean to a worker. While it serves, the first one asks front ends to
    send nothing more, and to hang up when what runs here has ended, or `within_s` have passed.
    Otherwise, and the second time, it ends at once, as if by sys.exit(0).
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        # Links have threads of their own, and a signal may come within another one's turn.
        self._lock = threading.RLock()  # over both that follow
        self._lines: frozenset[WorkerLine] = frozenset()  # over which requests may come
        self.has_begun = False

    @property
    def is_over(self) -> bool:
        """It leaves, and no front end has anything here any more."""
        return self.has_begun and not self._lines

    def take_signals(self) -> None:
        """For good, in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def begins(self, line: WorkerLine) -> None:
        """A line that comes too late is cut."""
        with self._lock:
            is_late = self.has_begun
            if not is_late:
                self._lines |= {line}
        if is_late:
            line.cut()

    def ends(self, line: WorkerLine) -> None:
        with self._lock:
            self._lines -= {line}

    def _on_signal(self, *_: object) -> None:
        with self._lock:
            lines = self._lines
            if not lines or self.has_begun:
                raise SystemExit(0)
            self.has_begun = True
        # In a thread, since whoever sends on a line may be what was interrupted.
        threading.Thread(target=self._ask, args=(lines,), daemon=True).start()

    def _ask(self, lines: frozenset[WorkerLine]) -> None:
        _log.warning("leaving: what runs here has %g s to end", self._within_s)
        for line in lines:
            with suppress(OSError):
                line.send(Leave(self._within_s))
        time.sleep(self._within_s + GRACE_S)
        os._exit(0)  # no front end keeps it for so long unless that is stuck


def serve_fronts(
    fronts: Sequence[Address],
    secret: bytes,
    *,
    role: Role,
    name: str,
    leaving: Leaving | None = None,
) -> None:
    """Serve whoever listens at these addresses, with one engine, until it has left. ConfigError
    where there is no front end left that wants this worker, or that it could serve.
    """
    leaving = leaving or Leaving(0.0)
    hello = Hello(name=name, role=role)
    fault: ConfigError | None = None
    with closing(SharedEngine(AsWorker(secret=secret))) as engine:
        ends: SimpleQueue[ConfigError | None] = SimpleQueue()
        for front in fronts:
            link = Link(front, secret, hello, engine, leaving, ends.put)
            threading.Thread(target=link.run, name=f"headrace-front-{front}", daemon=True).start()
        num_links = len(fronts)
        # Those that wait for a front end, or for its first word, have nothing to end.
        while num_links and not leaving.is_over:
            end = ends.get()
            num_links -= 1
            if end is not None:
                fault = end
                _log.warning("one front end less to work for: %s", fault.message)
    if fault is not None and not leaving.has_begun:
        raise fault


def meet_front(
    front: Address,
    secret: bytes,
    hello: Hello,
    engine: SharedEngine,
    leaving: Leaving,
    on_configured: Callable[[], None],
) -> None:
    """Serve whoever listens there, once: as Service.run."""
    with socket.create_connection(front, CONNECT_TIMEOUT_S) as stream:
        line = _greet(stream, secret)
        line.send(hello)
        try:
            Service(
                engine,
                line,
                # Other machines reach this one where the front end does.
                kv_host=stream.getsockname()[0],
                # Whoever was sent for ends with its front end in any case.
                is_leased=not hello.ticket,
                on_configured=on_configured,
                on_ready=lambda: leaving.begins(line),
            ).run()
        finally:
            leaving.ends(line)


class Link:
    """The way to one front end, again and again. `end` hears why it does not try again; None =
    it leaves.
    """

    def __init__(
        self,
        front: Address,
        secret: bytes,
        hello: Hello,
        engine: SharedEngine,
        leaving: Leaving,
        end: Callable[[ConfigError | None], None],
    ) -> None:
        self._front = front
        self._secret = secret
        self._hello = hello
        self._engine = engine
        self._leaving = leaving
        self._end = end
        self._delay_s = FIRST_DELAY_S
        self._was_configured = False

    def run(self) -> None:
        while not self._leaving.has_begun:
            self._was_configured = False
            why, is_fault = "", False
            role = self._engine.role or self._hello.role
            hello = msgspec.structs.replace(self._hello, role=role)
            try:
                meet_front(
                    self._front, self._secret, hello, self._engine, self._leaving, self._note
                )
            except ConfigError as error:
                self._end(error)
                return
            except (EOFError, OSError) as error:
                why = str(error)
            except HeadraceError as error:
                why, is_fault = error.message, True
            except Exception as error:
                # Without this link the worker would look alive, and come to nobody.
                _log.exception("a fault of headrace")
                why, is_fault = f"unexpected {type(error).__name__}: {error}", True
            if self._leaving.has_begun:
                break
            why = why or ("it is gone" if self._was_configured else "it hung up: same secret?")
            _log.warning("no front end at %s port %d: %s", *self._front, why)
            if self._was_configured and not is_fault:
                self._delay_s = FIRST_DELAY_S
            time.sleep(self._delay_s)
            self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)
        self._end(None)

    def _note(self) -> None:
        self._was_configured = True
        _log.warning("working for the front end at %s port %d", *self._front)


def _greet(stream: socket.socket, secret: bytes) -> WorkerLine:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_death(stream)
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
