"""Hears when workers were heard last, and tells who has stalled, and who is heard again.

Decides nothing: `core/router/stalls.py` does, and a FrontCore what that means.
"""

import logging
from collections.abc import Callable

from headrace.cluster.fleet import Fleet
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.router.front_events import FrontEvent, WorkerStalled
from headrace.core.router.stalls import Stalls

_log = logging.getLogger(__name__)


class StallWatch:
    """`handle` hears of both."""

    def __init__(self, fleet: Fleet, handle: Callable[[FrontEvent], None]) -> None:
        self._fleet = fleet
        self._handle = handle
        self._stalls = Stalls(round(fleet.config.stall_timeout_s * NS_PER_S))

    @property
    def next_ns(self) -> Ns | None:
        """When there is something to do without a word from anybody; None = never."""
        return self._stalls.next_ns

    def turn(self, now: Ns) -> None:
        """After all that has come was read."""
        ready = {slot.worker_id: slot for slot in self._fleet if slot.worker_id is not None}
        heard_ns = {worker_id: slot.heard_ns for worker_id, slot in ready.items()}
        for event in self._stalls.turn(now, heard_ns):
            slot = ready[event.worker_id]
            if isinstance(event, WorkerStalled):
                silence_s = (now - slot.heard_ns) / NS_PER_S
                _log.warning("worker %s has said nothing for %.3f s", slot.name, silence_s)
            else:
                _log.info("worker %s is heard again", slot.name)
            self._handle(event)
