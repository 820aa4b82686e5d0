"""Processes that were told to end: sees to it that they do. Belongs to the crew's thread."""

import time
from collections.abc import Iterable
from typing import Final

from headrace.cluster.process import WorkerProcess
from headrace.core.base.types import NS_PER_S, Ns

EXIT_TIMEOUT_S: Final = 10.0  # for workers to end by themselves
LAST_BREATH_S: Final = 1.0  # from the end of what a process says to its own
REAP_NS: Final = Ns(NS_PER_S // 10)  # between two looks at processes that end


class Endings:
    def __init__(self) -> None:
        self._kill_ns: dict[WorkerProcess, Ns] = {}  # when they are killed

    def add(self, process: WorkerProcess, now: Ns, timeout_s: float = EXIT_TIMEOUT_S) -> None:
        self._kill_ns[process] = Ns(now + round(timeout_s * NS_PER_S))

    def turn(self, now: Ns) -> None:
        """A parent has to ask for the end of each some time."""
        for process, kill_ns in list(self._kill_ns.items()):
            if process.exit_status() is not None:
                del self._kill_ns[process]
            elif now >= kill_ns:
                process.kill()

    def next_ns(self, now: Ns) -> Ns | None:
        return Ns(now + REAP_NS) if self._kill_ns else None

    def end_all(self, living: Iterable[WorkerProcess]) -> None:
        """With these, at once. Waits for it."""
        processes = [*living, *self._kill_ns]
        for process in processes:
            process.close()
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        for process in processes:
            if not process.wait(max(0.0, deadline_s - time.monotonic())):
                process.kill()
        for process in processes:
            process.wait(LAST_BREATH_S)
