"""Where the front end's thread waits: for workers' words, for room to send, and to be woken."""

import selectors
import socket
from collections.abc import Iterable
from contextlib import suppress

from headrace.cluster.door import Door, Guest
from headrace.cluster.fleet import Slot
from headrace.cluster.process import WorkerProcess
from headrace.core.base.types import Ns

_Line = WorkerProcess | Door | Guest
Speaker = Slot | Door | Guest


class Switchboard:
    """`wake` may be called from any thread, the rest from one."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._lines: dict[_Line, int] = {}  # with what is waited for

    def wake(self) -> None:
        # A bell that is full rings already; one that is closed has nobody to wake.
        with suppress(OSError):
            self._bell.send(b"\0")

    def wait(self, timeout_s: float) -> list[Speaker]:
        """Those that have said something, after what was unsent has been sent on as far as it goes.
        Empty where it was woken, or the time has passed.
        """
        speaking: list[Speaker] = []
        for key, events in self._selector.select(timeout_s):
            speaker = key.data
            if speaker is None:
                with suppress(BlockingIOError):
                    while self._ear.recv(4096):
                        pass
                continue
            if isinstance(speaker, Slot) and events & selectors.EVENT_WRITE and speaker.process:
                speaker.process.flush()
            if events & selectors.EVENT_READ:
                speaking.append(speaker)
        return speaking

    def follow(self, now: Ns, slots: Iterable[Slot], door: Door | None) -> None:
        """Listen to the processes that these have by now, and to whoever comes to the door; to
        nobody else.
        """
        wanted: dict[_Line, Speaker] = {
            slot.process: slot for slot in slots if slot.process is not None
        }
        if door is not None:
            wanted |= {guest: guest for guest in door}
            if door.rests_until(now) is None:
                wanted[door] = door
        for line in self._lines.keys() - wanted.keys():
            # Its socket is closed, and the number of that may be another one's already.
            self._selector.unregister(line)
            del self._lines[line]
        for line, speaker in wanted.items():
            events = _events(line)
            if line not in self._lines:
                self._selector.register(line, events, speaker)
            elif self._lines[line] != events:
                self._selector.modify(line, events, speaker)
            self._lines[line] = events

    def close(self) -> None:
        self._selector.close()
        self._ear.close()
        self._bell.close()


def _events(line: _Line) -> int:
    if getattr(line, "has_unsent", False):
        return selectors.EVENT_READ | selectors.EVENT_WRITE
    return selectors.EVENT_READ
