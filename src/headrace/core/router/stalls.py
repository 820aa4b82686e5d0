"""Stalls: which workers have said nothing for longer than a hand-off may wait for them.

A worker says something several times a second from a thread that computes nothing, however long a
step takes. So silence means that it has stopped, that the way to it is cut, or that its machine has
far too much to do. It is told only while somebody else is heard: where nobody is, it is the machine
that they share, or the listener's own, and no other worker would be sooner. Pure.
"""

from collections.abc import Mapping
from typing import Final

from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.router.front_events import WorkerResumed, WorkerStalled

# Who was asleep between two looks has not read what has come meanwhile: one look is none.
LOOK_NS: Final = Ns(50 * NS_PER_MS)
# After a silence that was nobody's own, or turned out to be none, all have time to say something.
CALM_NS: Final = Ns(500 * NS_PER_MS)


class Stalls:
    """Asked after everything that has come was read, and at `next_ns`."""

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._suspects: dict[WorkerId, Ns] = {}  # since when
        self._stalled: dict[WorkerId, Ns] = {}  # when they were heard last
        self._calm_until_ns = Ns(0)
        self.next_ns: Ns | None = None  # None = not before somebody is heard

    def turn(self, now: Ns, heard: Mapping[WorkerId, Ns]) -> list[WorkerStalled | WorkerResumed]:
        """What has become of those that are up, by when each was heard last."""
        events: list[WorkerStalled | WorkerResumed] = []
        for worker_id, heard_ns in list(self._stalled.items()):
            if heard.get(worker_id) == heard_ns:
                continue
            del self._stalled[worker_id]
            if worker_id in heard:
                events.append(WorkerResumed(worker_id))
                self._calm_until_ns = Ns(now + CALM_NS)
        silent = [one for one, heard_ns in heard.items() if now - heard_ns > self._limit_ns]
        if len(silent) == len(heard):
            self._suspects = {}
            self._calm_until_ns = Ns(now + CALM_NS)
            self.next_ns = None
            return events
        self._suspects = {
            one: self._suspects.get(one, now) for one in silent if one not in self._stalled
        }
        for worker_id, since_ns in list(self._suspects.items()):
            if now >= self._due_ns(since_ns):
                del self._suspects[worker_id]
                self._stalled[worker_id] = heard[worker_id]
                events.append(WorkerStalled(worker_id))
        self.next_ns = min(
            [
                *map(self._due_ns, self._suspects.values()),
                *(Ns(heard[one] + self._limit_ns + 1) for one in heard.keys() - set(silent)),
            ]
        )
        return events

    def _due_ns(self, since_ns: Ns) -> Ns:
        return Ns(max(since_ns + LOOK_NS, self._calm_until_ns))
