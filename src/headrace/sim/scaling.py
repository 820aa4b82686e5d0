"""An AutoscalerCore over the workers of a simulated cluster: what it is told, and its words made
true.

Decides when it is asked and what its words mean to places, as `cluster/autoscale.py` does for
processes; refuses to decide anything else.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from headrace.core.autoscaler.capacity import Replica
from headrace.core.autoscaler.core import AutoscalerCore
from headrace.core.autoscaler.events import (
    AutoscalerEffect,
    AutoscalerEvent,
    Drain,
    Observe,
    PoolWindow,
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
from headrace.core.base.errors import ConfigError, InvariantError
from headrace.core.base.events import CallAt, EngineEffect, EngineEvent, Timer
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.telemetry import RequestRecord
from headrace.sim.places import Place, Places
from headrace.sim.pool import Pool
from headrace.sim.runtime import SimRuntime

# By which measurements come before the decision.
WINDOW_LEAD_NS: Final = Ns(NS_PER_MS)
KINDS: Final = ({Role.MIXED}, {Role.PREFILL, Role.DECODE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscale:
    config: AutoscalerConfig
    start_up_s: float = 30.0  # from asking for a worker until it serves


@dataclass(slots=True)
class ScalingReport:
    effects: list[tuple[Ns, AutoscalerEffect]] = field(default_factory=list)  # but CallAt
    most_workers: int = 0  # at once, starting and draining ones included
    starting_ns: int = 0  # paid for, of workers that did not yet serve
    name_by_id: dict[WorkerId, str] = field(default_factory=dict)  # of all that served

    @property
    def switches(self) -> list[tuple[Ns, SwitchRole]]:
        return [(now, one) for now, one in self.effects if isinstance(one, SwitchRole)]


class Core(Protocol):
    """What is asked of a FrontCore."""

    def due_ns(self, now: Ns, worker_id: WorkerId) -> int: ...
    def waiting_for(self) -> list[Role]: ...


class World(Protocol):
    runtime: SimRuntime

    @property
    def is_over(self) -> bool: ...


class Scaling:
    """A Watcher of places. `slo` are the limits that are to be kept."""

    def __init__(
        self,
        world: World,
        asked: Autoscale,
        slo: Slo,
        pools: Sequence[Pool],
        places: Places,
        core: Core,
    ) -> None:
        roles = {pool.role for pool in pools}
        if roles not in KINDS or len(pools) != len(roles):
            raise ConfigError(
                "autoscaling needs workers of one kind, or prefill and decode workers",
                hint="begin with mixed workers alone, or with prefill and decode workers",
            )
        self._report = ScalingReport()
        self._world = world
        self._places = places
        self._core = core
        self._pools = {pool.role: pool for pool in pools}
        self._start_up_ns = Ns(round(asked.start_up_s * NS_PER_S))
        self._windows = PoolWindows(Ns(0), tuple(self._pools), slo)
        self._scaler = AutoscalerCore(
            asked.config,
            slo,
            {
                role: Replica.of(pool.believed, pool.config.scheduler, pool.spec)
                for role, pool in self._pools.items()
            },
        )

    def begin(self) -> None:
        """Those of the begin serve."""
        self._places.watcher = self
        for place in self._places:
            self.came(place)
        self._tell(Tick())

    def close(self) -> ScalingReport:
        self._report.most_workers = self._places.most
        self._report.starting_ns = self._places.starting_ns
        return self._report

    # ---- what it is told

    def sent(self, worker_id: WorkerId, seqs: Sequence[SeqSpec]) -> None:
        place = self._places.of(worker_id)
        if place is not None:
            self._windows.sent(worker_id, place.role, seqs)

    def note(self, event: EngineEvent, words: Sequence[EngineEffect]) -> None:
        self._windows.note(event, words)

    def arrived(self) -> None:
        self._tell_who_waits(has_arrived=True)

    def end(self, record: RequestRecord) -> None:
        self._windows.end(record)

    def came(self, place: Place) -> None:
        if place.worker is not None:
            self._report.name_by_id[place.worker.worker_id] = place.name
            self._tell(ReplicaUp(place.role, place.worker.worker_id))

    def went(self, role: Role, worker_id: WorkerId) -> None:
        self._tell(ReplicaDown(role, worker_id))
        self._tell_who_waits(has_arrived=False)

    def switched(self, place: Place, from_role: Role) -> None:
        if place.worker is not None:
            self._tell(RoleSwitched(place.worker.worker_id, from_role, place.role))

    def _tell(self, event: AutoscalerEvent) -> None:
        for effect in self._scaler.handle(self._world.runtime.now, event):
            self._carry_out(effect)
        self._scaler.check()

    def _tell_who_waits(self, *, has_arrived: bool) -> None:
        """Whoever arrives may want a prompt computed by a pool that is asleep."""
        up = {place.role for place in self._places if place.worker and place.stays}
        lonely = [role for role in self._pools if role not in up]
        asked = set(self._waiting_for()) if lonely else set()
        if has_arrived:
            asked.add(Role.PREFILL)
        for role in lonely:
            if role in asked:
                self._tell(RequestWaiting(role))

    def _waiting_for(self) -> list[Role]:
        home = self._windows.home
        return [role if role is Role.PREFILL else home for role in self._core.waiting_for()]

    # ---- its clock

    def _close_windows(self) -> None:
        if not self._world.is_over:
            self._tell_who_waits(has_arrived=False)
            for role in self._pools:
                self._tell(Observe(self._close_window(role)))

    def _ring(self, timer: Timer) -> None:
        if not self._world.is_over:
            self._tell(timer)

    def _close_window(self, role: Role) -> PoolWindow:
        places = [place for place in self._places if place.role is role and not place.is_closed]
        loads = {
            place.worker.worker_id: self._load(place, place.worker.worker_id)
            for place in places
            if place.worker is not None
        }
        return self._windows.close(
            self._world.runtime.now,
            role,
            loads,
            num_waiting=Counter(self._waiting_for())[role],
            num_starting=sum(place.worker is None and place.stays for place in places),
            num_draining=sum(place.is_leaving for place in places),
        )

    def _load(self, place: Place, worker_id: WorkerId) -> ReplicaLoad:
        assert place.worker is not None
        stats = place.worker.stats()
        return ReplicaLoad(
            replica_id=worker_id,
            queue_ms=self._core.due_ns(self._world.runtime.now, worker_id) / NS_PER_MS,
            num_running=stats.num_running,
            num_kv_tokens=stats.num_kv_tokens,
            num_cached_tokens=stats.num_cached_blocks * place.pool.spec.block_size,
        )

    # ---- what it wants

    def _carry_out(self, effect: AutoscalerEffect) -> None:
        runtime = self._world.runtime
        if isinstance(effect, CallAt):
            runtime.call_at(Ns(effect.at_ns - WINDOW_LEAD_NS), self._close_windows)
            runtime.call_at(effect.at_ns, partial(self._ring, Timer(effect.timer_id)))
            return
        self._report.effects.append((runtime.now, effect))
        match effect:
            case Scale(role, num_replicas):
                self._scale(role, num_replicas)
            case Drain(_, replica_id):
                self._places.drain(self._place(replica_id))
            case SwitchRole(replica_id, _, to_role):
                self._places.switch(self._place(replica_id), to_role)

    def _scale(self, role: Role, num_replicas: int) -> None:
        """Those that serve and are to leave have been named before."""
        staying = [place for place in self._places if place.stays and place.next_role is role]
        for _ in range(num_replicas - len(staying)):
            self._places.grow(self._pools[role], role, self._start_up_ns)
        idle = [place for place in staying if place.worker is None]
        for place in idle[::-1][: max(0, len(staying) - num_replicas)]:
            self._places.drain(place)

    def _place(self, replica_id: WorkerId) -> Place:
        place = self._places.of(replica_id)
        if place is None:
            raise InvariantError("no such replica", replica_id=replica_id)
        return place
