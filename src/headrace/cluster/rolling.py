"""A rolling restart: each worker ends and starts again, while the others serve.

Decides whose turn it is, and that it ends with the first whose canary fails: what is wrong with it
would be wrong with the rest. Refuses to know how a worker leaves. Belongs to the crew's thread.
"""

import time
from collections import deque

from headrace.cluster.crew import Crew
from headrace.cluster.fleet import Slot
from headrace.cluster.returns import FLEET
from headrace.core.base.types import WorkerId


class RollingRestart:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._lives = deque[WorkerId]()  # that are still to end
        self._last: tuple[Slot, int] | None = None  # whose turn it was, and its bad canaries then
        self._num, self._began_s = 0, 0.0  # of the restart that goes on; 0 = none does

    def begin(self) -> None:
        """With all workers of this machine that serve; those that are starting are fresh anyway."""
        self._last = None
        self._lives.clear()
        self._lives.extend(
            slot.worker_id
            for slot in self._crew.fleet
            if slot.worker_id is not None and not slot.is_remote
        )
        self._num, self._began_s = len(self._lives), time.monotonic()
        if self._num:
            slots = map(self._crew.fleet.of_worker, self._lives)
            names = ", ".join(slot.name for slot in slots if slot is not None)
            FLEET.info("a rolling restart was asked for and begins: %s", names)
        else:
            FLEET.warning(
                "a rolling restart was asked for, and no worker of this front end serves:"
                " those that came by themselves are restarted by whoever started them"
            )

    def turn(self) -> None:
        """The next one goes when everybody serves."""
        fleet = self._crew.fleet
        if self._lives and self._last is not None:
            self._stop_unless_good(*self._last)
        if not (self._num and all(slot.is_ready and slot.leaving is None for slot in fleet)):
            return
        if not self._lives:
            length_s = time.monotonic() - self._began_s
            FLEET.info("the rolling restart of %d workers has ended in %.1f s", self._num, length_s)
            self._num = 0
            return
        slot = fleet.of_worker(self._lives.popleft())
        if slot is not None:
            self._last = slot, slot.num_bad_canaries
            self._crew.leave(slot, comes_back=True)

    def _stop_unless_good(self, slot: Slot, num_bad_before: int) -> None:
        if slot.num_bad_canaries > num_bad_before:
            FLEET.error(
                "the rolling restart has stopped at worker %s (%s); not restarted: %d",
                slot.name,
                slot.fault,
                len(self._lives),
            )
            self._lives.clear()
            self._num = 0
