"""A rolling restart: each worker ends and starts again, while the others serve.

Decides whose turn it is; refuses to know how a worker leaves. Belongs to the crew's thread.
"""

from collections import deque

from headrace.cluster.crew import Crew
from headrace.core.base.types import WorkerId


class RollingRestart:
    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._lives = deque[WorkerId]()  # that are still to end

    def begin(self) -> None:
        """With all workers of this machine that serve; those that are starting are fresh anyway."""
        self._lives.clear()
        self._lives.extend(
            slot.worker_id
            for slot in self._crew.fleet
            if slot.worker_id is not None and not slot.is_remote
        )

    def turn(self) -> None:
        """The next one goes when everybody serves."""
        fleet = self._crew.fleet
        if self._lives and all(slot.is_ready and slot.leaving is None for slot in fleet):
            slot = fleet.of_worker(self._lives.popleft())
            if slot is not None:
                self._crew.leave(slot, back_as=slot.role)
