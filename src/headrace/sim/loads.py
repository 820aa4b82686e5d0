"""Loads that workers have told, of which most are never counted: only the last one before a choice
matters, and before anything else that the router books there.
"""

from collections.abc import Callable, Iterator

from headrace.core.base.types import Ns, WorkerId
from headrace.core.router.events import WorkerLoad, WorkerStats


class LoadReport:
    """A worker's load as of a moment, counted by `count` when somebody asks for it, or before the
    worker changes.
    """

    __slots__ = ("at_ns", "count", "is_dropped", "load", "num_received", "worker_id")

    def __init__(
        self, worker_id: WorkerId, at_ns: Ns, num_received: int, count: Callable[[], None]
    ) -> None:
        self.worker_id = worker_id
        self.at_ns = at_ns
        self.num_received = num_received
        self.count = count
        self.load: WorkerLoad | None = None
        self.is_dropped = False  # nobody will ask

    def stats(self) -> WorkerStats:
        if self.load is None:
            self.count()
        assert self.load is not None
        return WorkerStats(self.worker_id, self.load, self.num_received)


class UnheardLoads:
    """The last report of each worker that its router has not taken, with the time at which it came.
    A core.router.fleet.LateLoads.
    """

    def __init__(self, observe: Callable[[Ns, WorkerStats, tuple[()]], None] | None) -> None:
        """`observe` sees what is taken, with no effects."""
        self._reports: dict[WorkerId, tuple[Ns, LoadReport]] = {}
        self._observe = observe

    def hear(self, now: Ns, report: LoadReport) -> None:
        before = self._reports.pop(report.worker_id, None)
        if before is not None:
            before[1].is_dropped = True
        self._reports[report.worker_id] = now, report

    def take(self, worker_id: WorkerId) -> tuple[Ns, WorkerStats] | None:
        found = self._reports.pop(worker_id, None)
        if found is None:
            return None
        heard_ns, stats = found[0], found[1].stats()
        if self._observe is not None:
            self._observe(heard_ns, stats, ())
        return heard_ns, stats

    def take_all(self) -> Iterator[tuple[Ns, WorkerStats]]:
        for worker_id in list(self._reports):
            if (late := self.take(worker_id)) is not None:
                yield late
