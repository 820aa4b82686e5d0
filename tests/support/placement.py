"""A placer whose places are processes beside the test: what Ray is to a front end, without Ray."""

import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from headrace.cluster.placement.port import Ended, News, NoPlace, Order, Placed


class ProcessPlacer:
    """It has `num_places` on one node; who has none is told so at once."""

    def __init__(self, num_places: int = 8) -> None:
        self.num_places = num_places
        self.orders: list[Order] = []
        self.is_closed = False
        self._num_starting = 0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> list[int]:
        """Of those that run, the oldest first."""
        return [one.pid for one in self._processes.values() if one.poll() is None]

    def place(self, order: Order, hear: Callable[[News], None]) -> None:
        self.orders.append(order)
        is_full = len(self.pids) + self._num_starting >= self.num_places
        self._num_starting += not is_full
        work = self._refuse if is_full else self._live
        threading.Thread(target=work, args=(order, hear), daemon=True).start()

    def _refuse(self, order: Order, hear: Callable[[News], None]) -> None:
        hear(NoPlace(order.ticket, f"all {self.num_places} places are taken", "wait"))

    def _live(self, order: Order, hear: Callable[[News], None]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cluster.placement.worker"], stdin=subprocess.PIPE
        )
        self._processes[order.ticket] = process
        self._num_starting -= 1
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        hear(Placed(order.ticket, "here", num_sharing=4))
        code = process.wait()
        process.stdin.close()
        hear(Ended(order.ticket, f"signal {-code}" if code < 0 else f"exit code {code}"))

    def end(self, ticket: str) -> None:
        if ticket in self._processes:
            self._processes[ticket].kill()

    def close(self) -> None:
        self.is_closed = True
        for process in self._processes.values():
            process.kill()
            process.wait(10)
