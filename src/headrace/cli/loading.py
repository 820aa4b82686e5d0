"""What `headrace serve` loads, on a thread of its own.

A model takes about as long to load as the server's modules to be imported, and most of it without
the interpreter: so it begins first.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from headrace.cli.output import Progress, showing_progress

if TYPE_CHECKING:
    from headrace.cluster.boot import BootedCluster
    from headrace.live.boot import Booted
    from headrace.server.service import Service

# Hears of progress, and what is waited for in words; empty = nothing.
Look = Callable[[str], None]
Start = Callable[[Progress, Look], "Booted | BootedCluster"]


class Stopped(Exception):
    """Nobody waits for it any more."""


class Loading:
    """`service`, when there is one, is told what is waited for, and says whether anybody still
    wants it.
    """

    def __init__(self, start: Start) -> None:
        self.service: Service | None = None
        self._closed = threading.Event()
        self._end: Future[Booted | BootedCluster] = Future()
        # Daemonic: a signal between any two lines must not leave a process that nothing ends.
        self._thread = threading.Thread(
            target=self._run, args=(start,), name="headrace-loading", daemon=True
        )

    def begin(self) -> None:
        self._thread.start()

    def result(self) -> "Booted | BootedCluster":
        """Waits for it. Raises what the loading raises, and Stopped."""
        return self._end.result()

    def loaded(self) -> "Booted | BootedCluster | None":
        """What is there by now."""
        is_there = self._end.done() and self._end.exception() is None
        return self._end.result() if is_there else None

    def close(self) -> None:
        """Stop it, or end what it has loaded."""
        self._closed.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        booted = self.loaded()
        if booted is not None:
            booted.close()

    def _run(self, start: Start) -> None:
        try:
            with showing_progress() as report:
                self._end.set_result(start(self._checked(report), self._look))
        except BaseException as error:
            self._end.set_exception(error)
        # Worker processes end with the thread that has started them.
        self._closed.wait()

    def _checked(self, report: Progress) -> Progress:
        def checked(stage: str, done: int, total: int) -> None:
            if self._closed.is_set() or (self.service is not None and _is_closing(self.service)):
                raise Stopped
            report(stage, done, total)

        return checked

    def _look(self, text: str) -> None:
        if self.service is not None:
            self.service.waits_for = text


def _is_closing(service: "Service") -> bool:
    from headrace.server.service import Door  # as late as all of the server

    return service.door is Door.DRAINING
