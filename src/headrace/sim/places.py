"""Places of a simulated cluster, and the workers that come, change their roles and go there.

Decides what becomes of a worker and who hears of it; refuses to know why.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.engine.stats import EngineStats
from headrace.core.router.events import WorkerDown, WorkerDrain, WorkerRole, WorkersStarting
from headrace.sim.cluster_worker import Front, SimWorker
from headrace.sim.cores import SharedCores
from headrace.sim.pool import Habits, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """What one life of a worker was, or the part of it that it had a role."""

    name: str
    role: Role
    up_ns: Ns
    busy_ns: Ns  # in steps
    stats: EngineStats


@dataclass(slots=True, eq=False)
class Place:
    """Of one worker at a time. `role` is what the front end knows it to be for."""

    number: int
    pool: Pool
    role: Role
    worker: SimWorker | None = None
    asked_role: Role | None = None  # while it is asked to be for something else
    asked_ns: Ns | None = None  # for a worker that is to start
    is_leaving: bool = False
    is_closed: bool = False  # nobody comes here any more
    # Up to where the use of its worker is noted.
    noted_ns: int = 0
    noted_busy_ns: int = 0
    noted_stats: EngineStats | None = None

    @property
    def name(self) -> str:
        return f"worker-{self.number}"

    @property
    def next_role(self) -> Role:
        return self.role if self.asked_role is None else self.asked_role

    @property
    def stays(self) -> bool:
        """Whether a worker serves here, or will."""
        return not (self.is_leaving or self.is_closed)


class Watcher(Protocol):
    """Whoever wants to know who serves."""

    def came(self, place: Place) -> None: ...

    def went(self, role: Role, worker_id: WorkerId) -> None: ...

    def switched(self, place: Place, from_role: Role) -> None: ...


@dataclass(frozen=True, slots=True)
class Machines:
    sharing: int  # places that share the cores of one
    slow_down: tuple[float, ...]
    slow_down_large: tuple[float, ...]


class Places:
    """`num_at` says how many requests are under way at a worker."""

    def __init__(
        self,
        front: Front,
        pools: Sequence[Pool],
        habits: Habits,
        machines: Machines,
        num_at: Callable[[WorkerId], int],
    ) -> None:
        self.uses: list[WorkerUse] = []  # of those that are gone
        self.starting_ns = 0  # from being asked for until it serves, of those that were asked for
        self.most = 0  # places that somebody pays for, at once
        self.watcher: Watcher | None = None
        self._front = front
        self._habits = habits
        self._machines = machines
        self._num_at = num_at
        self._period_ns: Final = Ns(round(habits.stats_period_ms * NS_PER_MS))
        self._places: list[Place] = []
        self._cores: list[SharedCores] = []
        self._place_of: dict[WorkerId, Place] = {}
        self._num_started = 0  # workers, ever
        for pool in pools:
            for _ in range(pool.num_workers):
                self._add(pool)

    # ---- queries

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places)

    def __getitem__(self, worker_id: WorkerId) -> SimWorker:
        worker = self.worker(worker_id)
        if worker is None:
            raise InvariantError("no such worker", worker_id=worker_id)
        return worker

    def worker(self, worker_id: WorkerId) -> SimWorker | None:
        place = self._place_of.get(worker_id)
        return place.worker if place is not None else None

    def of(self, worker_id: WorkerId) -> Place | None:
        return self._place_of.get(worker_id)

    def workers(self) -> list[SimWorker]:
        """In the order in which they began."""
        return [place.worker for place in self._place_of.values() if place.worker is not None]

    # ---- workers come

    def start(self, place: Place) -> None:
        if (self._front.is_over and self._num_started) or place.worker is not None:
            return
        if place.is_leaving:
            return
        place.is_closed = False
        machines, front = self._machines, self._front
        worker_id = WorkerId(self._num_started)
        self._num_started += 1
        cores = self._cores[place.number // machines.sharing] if machines.slow_down else None
        pool = replace(place.pool, role=place.role)
        worker = SimWorker(front, worker_id, place.name, pool, self._habits, cores)
        place.worker = worker
        place.noted_ns, place.noted_busy_ns, place.noted_stats = front.runtime.now, 0, None
        self._place_of[worker_id] = place
        if place.asked_ns is not None:
            self.starting_ns += front.runtime.now - place.asked_ns
            place.asked_ns = None
        front.tell(worker.introduction())
        worker.tell_load()
        if self.watcher is not None:
            self._tell_starting()
            self.watcher.came(place)

    def grow(self, pool: Pool, role: Role, start_up_ns: Ns) -> None:
        """One more, of such workers, that serves after so long."""
        place = self._add(pool)
        place.role, place.asked_ns = role, self._front.runtime.now
        self._count()
        self._tell_starting()
        self._front.runtime.call_later(start_up_ns, partial(self.start, place))

    def _add(self, pool: Pool) -> Place:
        place = Place(len(self._places), pool, pool.role)
        self._places.append(place)
        machines = self._machines
        while len(self._cores) * max(1, machines.sharing) < len(self._places):
            slow_down, large = machines.slow_down, machines.slow_down_large
            cores = SharedCores(slow_down, self._front.runtime, slow_down_large=large)
            self._cores.append(cores)
        self._count()
        return place

    def _count(self) -> None:
        self.most = max(self.most, sum(not place.is_closed for place in self._places))

    def _tell_starting(self) -> None:
        num = sum(place.worker is None and place.stays for place in self._places)
        self._front.tell(WorkersStarting(num))

    # ---- workers change

    def switch(self, place: Place, role: Role) -> None:
        """It is asked, and for that from its own word on."""
        place.asked_role = role
        self._front.later(partial(self._hear_switch, place, place.worker, role))

    def _hear_switch(self, place: Place, worker: SimWorker | None, role: Role) -> None:
        self._front.later(partial(self._end_switch, place, worker, role))

    def _end_switch(self, place: Place, worker: SimWorker | None, role: Role) -> None:
        if worker is None or place.worker is not worker or self._front.is_over:
            return
        self._note_use(place, worker, self._front.runtime.now)
        before, place.role, place.asked_role = place.role, role, None
        self._front.tell(WorkerRole(worker.worker_id, role))
        if self.watcher is not None:
            self.watcher.switched(place, before)

    # ---- workers go

    def kill(self, place: Place, *, comes_back: bool) -> None:
        """The next one here is for what this one was to be for."""
        if place.worker is None or self._front.is_over:
            return
        place.is_closed = place.is_leaving or not comes_back
        self._remove(place, place.worker, "killed", is_failure=True)

    def drain(self, place: Place) -> None:
        """Nothing new is sent there; it goes when what it has is done and it lends no KV."""
        place.is_leaving = True
        if place.worker is None:
            self._close(place)
            return
        self._front.tell(WorkerDrain(place.worker.worker_id))
        self._front.runtime.call_later(self._period_ns, partial(self._go_if_done, place))

    def _go_if_done(self, place: Place) -> None:
        worker = place.worker
        if worker is None or self._front.is_over:
            return
        if self._num_at(worker.worker_id) or not worker.is_idle:
            self._front.runtime.call_later(self._period_ns, partial(self._go_if_done, place))
            return
        place.is_closed = True
        self._remove(place, worker, "it was asked to leave", is_failure=False)

    def _close(self, place: Place) -> None:
        """Whoever was to come is not needed."""
        place.is_closed = True
        if place.asked_ns is not None:
            self.starting_ns += self._front.runtime.now - place.asked_ns
            place.asked_ns = None
        self._tell_starting()

    def _remove(self, place: Place, worker: SimWorker, reason: str, *, is_failure: bool) -> None:
        place.worker = None
        del self._place_of[worker.worker_id]
        worker.die()
        self._note_use(place, worker, self._front.runtime.now)
        role, place.role, place.asked_role = place.role, place.next_role, None
        self._front.network.lose(worker.kv_address)
        if self.watcher is not None:
            self._tell_starting()
        self._front.tell(WorkerDown(worker.worker_id, reason, is_failure))
        if self.watcher is not None:
            self.watcher.went(role, worker.worker_id)

    # ---- what they were

    def close(self, end_ns: Ns) -> None:
        """All requests have ended."""
        for worker in self.workers():
            worker.close(end_ns)

    def note_uses(self, end_ns: Ns) -> None:
        for place in self._place_of.values():
            if place.worker is not None:
                self._note_use(place, place.worker, end_ns)
        for place in self._places:
            if place.asked_ns is not None:
                self.starting_ns += end_ns - place.asked_ns

    def _note_use(self, place: Place, worker: SimWorker, until_ns: Ns) -> None:
        """Since the last time that it was noted."""
        stats, busy_ns = worker.stats(), worker.busy_ns
        self.uses.append(
            WorkerUse(
                name=worker.name,
                role=place.role,
                up_ns=Ns(max(0, until_ns - place.noted_ns)),
                busy_ns=Ns(busy_ns - place.noted_busy_ns),
                stats=_since(place.noted_stats, stats),
            )
        )
        place.noted_ns, place.noted_busy_ns, place.noted_stats = until_ns, busy_ns, stats


def _since(before: EngineStats | None, stats: EngineStats) -> EngineStats:
    """What it did; how it stands is as of now."""
    if before is None:
        return stats
    done = (
        "num_preemptions",
        "num_recomputed_tokens",
        "num_queried_tokens",
        "num_hit_tokens",
        "num_steps",
        "num_failed_steps",
        "num_computed_tokens",
    )
    changes = {name: getattr(stats, name) - getattr(before, name) for name in done}
    return msgspec.structs.replace(stats, **changes)
