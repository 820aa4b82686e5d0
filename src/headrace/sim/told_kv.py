"""What a worker tells of its blocks: at once, or when its front end asks.

Decides which of these messages are lost, late or told twice; refuses to know what a front end makes
of them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final, Protocol

from headrace.core.base.events import BlocksStored, KvChange
from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.engine.passed import Changes
from headrace.core.kv.manager import KvManager
from headrace.core.router.events import WorkerKv, WorkerKvSnapshot
from headrace.sim.pool import Habits, Pool
from headrace.sim.runtime import SimRuntime
from headrace.sim.tiers import Tiers, WorkerTiers, num_leading

MAX_LATE: Final = 1024  # times that blocks changed since they were told of

Deliver = Callable[[WorkerKv | WorkerKvSnapshot], None]


class Around(Protocol):
    runtime: SimRuntime
    rng: Random
    message_ns: Ns  # that a message takes


def tells_late(pool: Pool, habits: Habits) -> bool:
    """Whether changes are told when somebody asks."""
    return habits.tells_late and not pool.tiers


class ToldKv:
    """Of one worker. `deliver` brings what has arrived to the front end."""

    def __init__(
        self,
        around: Around,
        worker_id: WorkerId,
        pool: Pool,
        habits: Habits,
        kv: KvManager,
        deliver: Deliver,
    ) -> None:
        self._around = around
        self._worker_id = worker_id
        self._deliver = deliver
        self._kv = kv
        # What is there: where lower tiers have to know, and once somebody wants to copy from it.
        self._cached: dict[bytes, None] | None = {} if pool.tiers else None
        self.tiers: WorkerTiers | None = None
        if pool.tiers:
            tiers = Tiers(pool.tiers, pool.kv_block_bytes)
            config = pool.config.kv
            assert self._cached is not None
            self.tiers = WorkerTiers(tiers, self._cached, pool.spec, pool.believed, config)
        self.is_late = tells_late(pool, habits)
        self._no = 0
        # Changes that are told when the front end asks, with the time when it should have heard of
        # them; the first one's number.
        self._late: deque[tuple[Ns, Changes]] = deque()
        self._late_no = 0
        self._faults = habits.faults

    # ---- queries

    def num_leading(self, names: Sequence[bytes]) -> int:
        """How many of these its device has, up to the first that it has not."""
        if self._cached is None:
            self._cached = dict.fromkeys(self._kv.names())
        return num_leading(self._cached, names)

    def snapshot(self) -> WorkerKvSnapshot:
        names = self._kv.names() if self.tiers is None else self.tiers.names()
        return WorkerKvSnapshot(self._worker_id, self._no, tuple(names))

    # ---- what is told

    def publish(self, at_ns: Ns, changes: Changes) -> None:
        if self._cached is not None:
            _apply(changes, self._cached)
        runtime = self._around.runtime
        heard_ns = Ns(at_ns + self._around.message_ns)
        if self.is_late:
            # Those who have a chain's first block are asked for what is behind it, and no others.
            self._late.append((heard_ns, changes))
            self._no += len(changes)
            if len(self._late) > MAX_LATE or self._has_first(changes):
                runtime.call_at(heard_ns, self.tell_late)
            return
        if self.tiers is not None:
            changes = self.tiers.seen_from_above(runtime.now, changes)
        event = WorkerKv(self._worker_id, self._no, changes)
        self._no += len(changes)
        if self._faults.happen:
            self._send(event)
        else:
            runtime.call_at(heard_ns, partial(self._deliver, event))

    def _has_first(self, changes: Changes) -> bool:
        """Whether one of them is the first of a chain."""
        for change in changes:
            if type(change) is BlocksStored and self._kv.is_root(change.parent):
                return True
        return False

    def _send(self, event: WorkerKv) -> None:
        """Unless it is lost."""
        faults, rng, runtime = self._faults, self._around.rng, self._around.runtime
        if rng.random() < faults.kv_lost:
            return
        if rng.random() < faults.kv_twice:
            runtime.call_later(self._around.message_ns, partial(self._deliver, event))
        delay_ns = self._around.message_ns
        if rng.random() < faults.kv_late:
            delay_ns = Ns(round(rng.random() * faults.late_ms * NS_PER_MS))
        runtime.call_later(delay_ns, partial(self._deliver, event))

    def take_late(self, until_ns: Ns) -> WorkerKv | None:
        """What the front end should have heard by then and has not."""
        first_no, late = self._late_no, self._late
        changes: list[KvChange] = []
        while late and late[0][0] <= until_ns:
            changes += late.popleft()[1]
        self._late_no += len(changes)
        return WorkerKv(self._worker_id, first_no, tuple(changes)) if changes else None

    def tell_late(self) -> None:
        if (event := self.take_late(self._around.runtime.now)) is not None:
            self._deliver(event)


def _apply(changes: Changes, cached: dict[bytes, None]) -> None:
    for change in changes:
        if type(change) is BlocksStored:
            cached.update(dict.fromkeys(change.names))
        else:
            for name in change.names:
                del cached[name]
