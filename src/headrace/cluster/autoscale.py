"""Lets an AutoscalerCore decide how many workers there are, and makes it so.

Decides when it is asked and what its words mean to workers; refuses to decide anything else. Should
it fail, everything stays as it is. Belongs to the crew's thread.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headrace.cluster.crew import Crew
from headrace.cluster.fleet import Slot
from headrace.cluster.roles import AUTOSCALER, SetWorkerRole
from headrace.core.autoscaler.capacity import Replica
from headrace.core.autoscaler.core import LOAD_TIMER, AutoscalerCore
from headrace.core.autoscaler.events import (
    AutoscalerEffect,
    AutoscalerEvent,
    Drain,
    Observe,
    PoolWindow,
    Reason,
    ReplicaDown,
    ReplicaLoad,
    ReplicaUp,
    RequestWaiting,
    RoleSwitched,
    Scale,
    SwitchRole,
    Tick,
)
from headrace.core.autoscaler.windows import PoolWindows
from headrace.core.base.errors import RequestError
from headrace.core.base.events import Arrive, CallAt, EngineEffect, EngineEvent, Timer
from headrace.core.base.machine import Machine
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.router.front import FrontCore
from headrace.live.port import PoolStatus

_log = logging.getLogger(__name__)

Scaler = Machine[AutoscalerEvent, AutoscalerEffect]
MakeScaler = Callable[[Mapping[Role, Replica]], Scaler]

WINDOW_LEAD_NS: Final = Ns(NS_PER_MS)  # by which measurements come before the decision


def make_scaler(config: AutoscalerConfig, slo: Slo) -> MakeScaler:
    return lambda replicas: AutoscalerCore(config, slo, replicas)


class Autoscaling:
    """`scaler` is made when the first workers are ready: what one can do is known by then. A
    replica is a worker under its id, which it keeps where its role changes.
    """

    def __init__(self, crew: Crew, core: FrontCore, scaler: MakeScaler, slo: Slo) -> None:
        self._crew = crew
        self._core = core
        self._make_scaler = scaler
        self._slo = slo
        self._scaler: Scaler | None = None
        self._windows: PoolWindows | None = None
        self._roles: tuple[Role, ...] = ()
        self._up: dict[WorkerId, Role] = {}  # as the scaler knows them
        self._wanted: dict[Role, int] = {}
        self._reasons: dict[Role, Reason] = {}  # of the last decisions
        self._timer_ns: Ns | None = None
        self._window_ns: Ns | None = None
        self._has_arrived = False  # a request, since the last turn
        self.has_failed = False  # for good: what sleeps is not woken any more
        self._now = Ns(0)

    # ---- what it is told

    def sent(self, worker_id: WorkerId, seqs: Sequence[SeqSpec]) -> None:
        """These go to this worker."""
        slot = self._crew.fleet.of_worker(worker_id)
        if self._windows is not None and slot is not None:
            self._windows.sent(worker_id, slot.role, seqs)

    def observe(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        self._has_arrived |= isinstance(event, Arrive) and bool(event.seqs)
        if self._windows is not None:
            self._windows.observe(now, event, effects)

    def turn(self, now: Ns) -> None:
        """After each turn of the crew."""
        self._now = now
        if self.has_failed:
            return
        try:
            self._work()
        except Exception as error:
            self.has_failed, self._windows = True, None  # nobody would empty them
            _log.critical("autoscaling has ended: workers stay as they are", exc_info=error)

    # ---- queries

    def next_ns(self) -> Ns | None:
        """When there is something to do; None = when a worker has something to say."""
        return None if self.has_failed else self._window_ns or self._timer_ns

    def pools(self) -> list[PoolStatus]:
        return [self._pool(role) for role in self._roles]

    def allows(self, wish: SetWorkerRole) -> bool:
        """An operator may move workers between pools that there are, and not while one is moved;
        `wish` hears why not.
        """
        message, hint = self._fault(wish)
        if message:
            error = RequestError(message, status_hint=409, code="conflict", hint=hint)
            wish.done.set_exception(error)
        return not message

    def _fault(self, wish: SetWorkerRole) -> tuple[str, str]:
        """What is wrong with it and what helps; empty = nothing."""
        if self._roles and wish.role not in self._roles:
            kinds = " and ".join(role.value for role in self._roles)
            message = f"the autoscaler has no pool of {wish.role.value} workers"
            return message, f"it looks after {kinds} workers"
        # Two moves at once could bring it back before the scaler has seen the first, which would
        # wait for that for ever.
        if any(slot.name == wish.name and slot.asked_role for slot in self._crew.fleet):
            return f"worker {wish.name} is changing its role already", "try again in a moment"
        return "", ""

    def _pool(self, role: Role) -> PoolStatus:
        slots = [slot for slot in self._crew.fleet if slot.role is role]
        reason = self._reasons.get(role)
        forecast = reason.forecast if reason else None
        return PoolStatus(
            role=role.value,
            num_wanted=self._wanted.get(role, len(self._staying(role))),
            num_ready=sum(slot.is_ready and slot.leaving is None for slot in slots),
            num_starting=sum(not slot.is_ready and slot.leaving is None for slot in slots),
            num_draining=sum(slot.leaving is not None for slot in slots),
            loop=reason.loop.value if reason else "",
            constraint=forecast.constraint.value if forecast else "",
            is_limited=reason is not None and reason.is_limited,
        )

    # ---- what it tells the scaler

    def _work(self) -> None:
        if self._scaler is None:
            self._begin()
            return
        self._tell_who_serves()
        self._tell_who_waits()
        if self._window_ns is not None and self._now >= self._window_ns:
            self._window_ns = None
            for role in self._roles:
                self._tell(Observe(self._close_window(role)))
        if self._timer_ns is not None and self._now >= self._timer_ns:
            self._timer_ns = None
            self._tell(Timer(LOAD_TIMER))

    def _begin(self) -> None:
        start = self._crew.start
        if not start.done() or start.exception() is not None:
            return
        replicas = {
            ready.role: Replica.of(ready.cost, ready.config.scheduler, ready.spec)
            for ready in start.result()
        }
        self._roles = tuple(replicas)
        self._windows = PoolWindows(self._now, self._roles, self._slo)
        self._scaler = self._make_scaler(replicas)
        self._tell_who_serves()
        self._tell(Tick())

    def _tell(self, event: AutoscalerEvent) -> None:
        assert self._scaler is not None
        for effect in self._scaler.handle(self._now, event):
            self._carry_out(effect)

    def _tell_who_serves(self) -> None:
        up = {slot.worker_id: slot.role for slot in self._crew.fleet if slot.worker_id is not None}
        if up == self._up:
            return
        before, self._up = self._up, up
        for replica_id in sorted(before.keys() - up.keys()):
            self._tell(ReplicaDown(before[replica_id], replica_id))
        for replica_id, role in sorted(up.items() - before.items()):
            if replica_id in before:
                self._tell(RoleSwitched(replica_id, before[replica_id], role))
            else:
                self._tell(ReplicaUp(role, replica_id))

    def _tell_who_waits(self) -> None:
        """Whoever arrives may want a prompt computed by a pool that is asleep."""
        up = {slot.role for slot in self._crew.fleet if slot.is_ready and slot.leaving is None}
        lonely = [role for role in self._roles if role not in up]
        asked = set(self._waiting_for()) if lonely else set()
        if self._has_arrived:
            asked.add(Role.PREFILL)
        self._has_arrived = False
        for role in lonely:
            if role in asked:
                self._tell(RequestWaiting(role))

    def _waiting_for(self) -> list[Role]:
        assert self._windows is not None
        home = self._windows.home
        return [role if role is Role.PREFILL else home for role in self._core.waiting_for()]

    def _close_window(self, role: Role) -> PoolWindow:
        assert self._windows is not None
        pool = self._pool(role)
        slots = [slot for slot in self._crew.fleet if slot.role is role]
        loads = {
            slot.worker_id: self._load(slot, slot.worker_id)
            for slot in slots
            if slot.worker_id is not None
        }
        return self._windows.close(
            self._now,
            role,
            loads,
            num_waiting=Counter(self._waiting_for())[role],
            num_starting=pool.num_starting,
            num_draining=sum(
                slot.leaving is not None and not slot.leaving.comes_back for slot in slots
            ),
        )

    def _load(self, slot: Slot, worker_id: WorkerId) -> ReplicaLoad:
        queue_ms = self._core.due_ns(self._now, worker_id) / NS_PER_MS
        if slot.stats is None or slot.ready is None:
            return ReplicaLoad(replica_id=worker_id, queue_ms=queue_ms)
        return ReplicaLoad(
            replica_id=worker_id,
            queue_ms=queue_ms,
            num_running=slot.stats.num_running,
            num_kv_tokens=slot.stats.num_kv_tokens,
            num_cached_tokens=slot.stats.num_cached_blocks * slot.ready.spec.block_size,
        )

    # ---- what it wants

    def _carry_out(self, effect: AutoscalerEffect) -> None:
        match effect:
            case CallAt(at_ns):
                self._timer_ns, self._window_ns = at_ns, Ns(at_ns - WINDOW_LEAD_NS)
            case Scale(role, num_replicas, reason):
                self._note(role, num_replicas, reason)
                self._scale(role, num_replicas)
            case Drain(_, replica_id):
                self._crew.leave(self._slot(replica_id))
            case SwitchRole(replica_id, from_role, to_role, reason):
                self._crew.roles.begin(self._slot(replica_id), to_role, AUTOSCALER)
                self._note(from_role, len(self._staying(from_role)), reason)
                self._note(to_role, len(self._staying(to_role)), reason)

    def _note(self, role: Role, num_replicas: int, reason: Reason) -> None:
        self._wanted[role], self._reasons[role] = num_replicas, reason
        limited = ", as many as there may be" if reason.is_limited else ""
        _log.info("pool %s: %d workers wanted (%s%s)", role, num_replicas, reason.loop, limited)

    def _scale(self, role: Role, num_replicas: int) -> None:
        """Those that serve and are to leave have been named before."""
        staying = self._staying(role)
        for _ in range(num_replicas - len(staying)):
            self._crew.fleet.grow(role)
        idle = [slot for slot in staying if not slot.is_ready and slot.leaving is None]
        for slot in idle[::-1][: max(0, len(staying) - num_replicas)]:
            self._crew.leave(slot)

    def _staying(self, role: Role) -> list[Slot]:
        """Slots that are, or will be, of this pool."""
        return [
            slot
            for slot in self._crew.fleet
            if slot.next_role is role and (slot.leaving is None or slot.leaving.comes_back)
        ]

    def _slot(self, replica_id: WorkerId) -> Slot:
        slot = self._crew.fleet.of_worker(replica_id)
        assert slot is not None
        return slot
