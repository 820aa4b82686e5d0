"""A worker process: one engine, driven by what front ends send.

    python -m headrace.cluster.worker FD

is one of the front end's own, over a socket that it inherits; `cluster/remote.py` is one that goes
to front ends by itself. Decides nothing about requests; refuses to work for a front end that it
does not hear.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress

from headrace.cluster.shared import Boot, Member, Occupied, SharedEngine
from headrace.cluster.wire import PROTOCOL, Beat, Configure, OtherProtocol, ToWorker, Unfit
from headrace.cluster.worker_line import WorkerLine
from headrace.core.base.errors import ConfigError, TransferError
from headrace.live.boot import AsWorker, boot

_log = logging.getLogger(__name__)

BEAT_S = 0.25
# A front end speaks twice within `silence_timeout_s` and is let go after as many of them.
LEASE_TIMEOUTS = 3
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Service:
    """What a worker does for one front end, from its first word to its last.

    `on_lost` hears of its end at once while the model loads, `on_configured` of its first word, and
    `on_ready` when requests may come. A front end is `leased` where it has to say something now and
    then.
    """

    def __init__(
        self,
        engine: SharedEngine,
        line: WorkerLine,
        *,
        kv_host: str = "",
        is_leased: bool = False,
        on_lost: Callable[[], None] = lambda: None,
        on_configured: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._line = line
        self._kv_host = kv_host
        self._is_leased = is_leased
        self._on_lost = on_lost
        self._on_configured = on_configured
        self._on_ready = on_ready
        self._lease_s: float | None = None  # None = however long it is silent
        self._member: Member | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        """Until the front end is gone, which is an EOFError or an OSError. What keeps the worker
        from serving it is told as Unfit, and a ConfigError or Occupied; where the front end does
        not want it, that is a ConfigError too.
        """
        beat = threading.Thread(target=self._beat, name="headrace-beat", daemon=True)
        beat.start()
        try:
            asked, rest = self._configuration()
            self._on_configured()
            self._serve(asked, rest)
        except (ConfigError, Occupied) as error:
            with suppress(OSError):
                self._line.send(Unfit(error.message, error.hint))
            raise
        finally:
            self._is_over.set()
            # A thread that sleeps at the process's end keeps an engine: nanobind complains of that.
            beat.join(BEAT_S)

    def _configuration(self) -> tuple[Configure, list[ToWorker]]:
        """The first message, and what came with it."""
        try:
            while not (messages := self._line.receive()):
                pass
        except OtherProtocol as error:
            raise ConfigError(
                f"the front end speaks protocol {error.protocol}, this worker {PROTOCOL}",
                hint="run the same version of headrace on all machines",
            ) from error
        first, *rest = messages
        if not isinstance(first, Configure):
            raise TransferError("a worker must be configured first")
        if self._is_leased:
            self._lease_s = LEASE_TIMEOUTS * first.config.cluster.silence_timeout_s
        return first, rest

    def _serve(self, asked: Configure, rest: list[ToWorker]) -> None:
        logging.basicConfig(level=asked.config.telemetry.log_level.upper())
        member = self._member = self._engine.enter(asked, self._line, self._kv_host)
        self._on_ready()
        try:
            while True:
                for message in rest:
                    member.obey(message)
                rest = self._line.receive()
        finally:
            self._engine.leave(member)

    def _beat(self) -> None:
        """From the first moment on, so that silence always means trouble."""
        while not self._is_over.wait(BEAT_S):
            if self._lease_s is not None and self._line.silence_s > self._lease_s:
                _log.warning("a front end has said nothing for %.1f s", self._line.silence_s)
                self._line.cut()
            try:
                if self._member is None:
                    self._line.send(Beat())
                else:
                    self._member.beat()
            except OSError:  # the front end is gone
                if self._member is None:
                    self._on_lost()
                return


def end_with_parent() -> None:
    """Also where this process is stopped, and cannot see that nobody is there any more. Linux only;
    elsewhere the end of the socket has to do.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(boot: Boot = boot) -> None:
    """`boot` makes the engine that is served."""
    end_with_parent()
    # A terminal's Ctrl-C, or its end, reaches the whole group; the front end decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # What a parent ignores is ignored from birth: nobody could ask this process to end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stream = socket.socket(fileno=int(sys.argv[1]))
    with closing(SharedEngine(AsWorker(), boot)) as engine:
        try:
            # Nobody waits for what loads when the front end is gone.
            Service(engine, WorkerLine(stream, secret=b""), on_lost=lambda: os._exit(0)).run()
        except (EOFError, OSError):
            pass  # the front end is gone
        except ConfigError:
            sys.exit(2)  # the front end has been told, or told it
        except TransferError as error:
            _log.critical("%s", error)
            sys.exit(1)


if __name__ == "__main__":
    main()
