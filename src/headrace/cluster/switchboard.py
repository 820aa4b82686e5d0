"""Where the front end's thread waits: for workers' words, for room to send, and to be woken."""

import selectors
import socket
from collections.abc import Iterable
from contextlib import suppress

from headrace.cluster.fleet import Slot
from headrace.cluster.process import WorkerProcess


class Switchboard:
    """`wake` may be called from any thread, the rest from one."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._lines: dict[WorkerProcess, int] = {}  # with what is waited for

    def wake(self) -> None:
        # A bell that is full rings already; one that is closed has nobody to wake.
        with suppress(OSError):
            self._bell.send(b"\0")

    def wait(self, timeout_s: float) -> list[Slot]:
        """Those that have said something, after what was unsent has been sent on as far as it goes.
        Empty where it was woken, or the time has passed.
        """
        speaking = []
        for key, events in self._selector.select(timeout_s):
            slot = key.data
            if slot is None:
                with suppress(BlockingIOError):
                    while self._ear.recv(4096):
                        pass
                continue
            if events & selectors.EVENT_WRITE and slot.process is not None:
                slot.process.flush()
            if events & selectors.EVENT_READ:
                speaking.append(slot)
        return speaking

    def follow(self, slots: Iterable[Slot]) -> None:
        """Wait for the processes that these have by now, and for no other."""
        wanted = {slot.process: slot for slot in slots if slot.process is not None}
        for process in self._lines.keys() - wanted.keys():
            # Its socket is closed, and the number of that may be another one's already.
            self._selector.unregister(process)
            del self._lines[process]
        for process, slot in wanted.items():
            events = _events(process)
            if process not in self._lines:
                self._selector.register(process, events, slot)
            elif self._lines[process] != events:
                self._selector.modify(process, events, slot)
            self._lines[process] = events

    def close(self) -> None:
        self._selector.close()
        self._ear.close()
        self._bell.close()


def _events(process: WorkerProcess) -> int:
    if process.has_unsent:
        return selectors.EVENT_READ | selectors.EVENT_WRITE
    return selectors.EVENT_READ
