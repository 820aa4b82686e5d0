"""AutoscalerCore: the machine that decides how many replicas there are. Events in, effects out.

It owns the counts and when they are looked at. What a pool needs is `judge`'s matter, what a
replica can do `capacity`'s, what comes next `predictors`', who gets the budget `budget`'s.
"""

from collections.abc import Mapping
from typing import assert_never

import msgspec

from headrace.core.autoscaler.budget import grant
from headrace.core.autoscaler.capacity import Replica
from headrace.core.autoscaler.events import (
    AutoscalerEffect,
    AutoscalerEvent,
    Drain,
    Forecast,
    Loop,
    Observe,
    Reason,
    ReplicaDown,
    ReplicaUp,
    RequestWaiting,
    RoleSwitched,
    Scale,
    SwitchRole,
    Tick,
)
from headrace.core.autoscaler.judge import Need, can_spare, fade_strain, find_need
from headrace.core.autoscaler.pool import Pool
from headrace.core.base.errors import InvariantError
from headrace.core.base.events import CallAt, Timer
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.autoscaler import AutoscalerConfig

LOAD_TIMER = 0

# Between these, replicas can be switched: to, from.
OTHER_ROLE = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def _limits(role: Role, slo: Slo) -> Slo:
    """Those that a pool of this role can miss."""
    return Slo(
        ttft_ms=None if role == Role.DECODE else slo.ttft_ms,
        itl_ms=None if role == Role.PREFILL else slo.itl_ms,
    )


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as it stands, for people."""

    role: Role
    num_wanted: int | None  # None = not observed yet
    num_active: int
    num_draining: int
    is_held: bool  # nothing can be said about what it needs
    demand_per_s: float | None  # predicted
    predictor: str
    strain: float
    start_up_s: float  # expected of the next start


class AutoscalerCore:
    """`handle(now, event) -> effects`.

    `slo` are the limits that the configured share of requests must keep; what it does not state
    limits nothing.
    """

    def __init__(
        self, config: AutoscalerConfig, slo: Slo, replicas: Mapping[Role, Replica]
    ) -> None:
        self.config = config
        self._pools = {
            role: Pool(role, replica, config, _limits(role, slo))
            for role, replica in replicas.items()
        }
        self._load_ns = Ns(round(config.load_interval_s * NS_PER_S))
        self._interval_ns = Ns(round(config.throughput_interval_s * NS_PER_S))
        self._load_due_ns: Ns | None = None  # None = not begun
        self._interval_due_ns = Ns(0)
        self._switched_ns: Ns | None = None
        self._held: set[Role] = set()
        self._now = Ns(0)

    # ---- queries

    def state(self) -> tuple[PoolState, ...]:
        return tuple(
            PoolState(
                role=pool.role,
                num_wanted=pool.target,
                num_active=len(pool.active),
                num_draining=pool.num_draining,
                is_held=pool.role in self._held,
                demand_per_s=pool.demand,
                predictor=pool.predictor.name,
                strain=pool.strain,
                start_up_s=pool.lead_ns / NS_PER_S,
            )
            for pool in self._pools.values()
        )

    def check(self) -> None:
        """Raise InvariantError unless everybody who leaves is there, and nobody is in two pools."""
        known: set[WorkerId] = set()
        for pool in self._pools.values():
            if known & pool.up_ns.keys() or not pool.leaving.keys() <= pool.up_ns.keys():
                raise InvariantError("replica in the wrong place", role=pool.role)
            known |= pool.up_ns.keys()

    # ---- the machine

    def handle(self, now: Ns, event: AutoscalerEvent) -> list[AutoscalerEffect]:
        if now < self._now:
            raise InvariantError("time went back", last=self._now, now=now)
        self._now = now
        effects: list[AutoscalerEffect] = []
        match event:
            case Tick() | Timer():
                pass
            case Observe(window):
                self._pool(window.role).observe(now, window)
            case ReplicaUp(role, replica_id):
                self._pool(role).up(now, replica_id)
                self._drain_surplus(
                    self._pool(role), _plain(self._pool(role), Loop.LIMITS), effects
                )
            case ReplicaDown(role, replica_id):
                self._down(now, self._pool(role), replica_id, effects)
            case RoleSwitched(replica_id, from_role, to_role):
                self._switched(now, replica_id, self._pool(from_role), self._pool(to_role))
            case RequestWaiting(role):
                self._wake(now, self._pool(role), effects)
            case _:
                assert_never(event)
        self._decide_what_is_due(now, effects)
        return effects

    def _pool(self, role: Role) -> Pool:
        if (pool := self._pools.get(role)) is None:
            raise InvariantError("no such pool", role=role, known=sorted(self._pools))
        return pool

    def _down(
        self, now: Ns, pool: Pool, replica_id: WorkerId, effects: list[AutoscalerEffect]
    ) -> None:
        to_role = pool.leaving.get(replica_id)
        is_missed = pool.down(now, replica_id)
        if to_role is not None:  # it will never arrive
            pool = self._pools[to_role]
            pool.arriving.discard(replica_id)
            is_missed = True
        if is_missed and pool.target:
            pool.ask(now, pool.target)
            effects.append(Scale(pool.role, pool.target, _plain(pool, Loop.REPLACE)))

    def _switched(self, now: Ns, replica_id: WorkerId, giver: Pool, taker: Pool) -> None:
        """Where somebody else has asked for it, what they want counts: each pool's number changes,
        and the next switch has to wait.
        """
        if replica_id not in giver.leaving:
            self._move(now, replica_id, giver, taker)
        giver.down(now, replica_id)
        taker.up(now, replica_id)

    def _move(self, now: Ns, replica_id: WorkerId, giver: Pool, taker: Pool) -> None:
        giver.leave((replica_id,), taker.role)
        taker.arriving.add(replica_id)
        for pool, step in ((giver, -1), (taker, 1)):
            if pool.target is not None:
                pool.ask(now, max(0, pool.target + step))
        self._switched_ns = now

    def _wake(self, now: Ns, pool: Pool, effects: list[AutoscalerEffect]) -> None:
        if not pool.target:
            pool.is_woken = True
            pool.idle_since_ns = None
            self._decide(now, effects)

    def _decide_what_is_due(self, now: Ns, effects: list[AutoscalerEffect]) -> None:
        if self._load_due_ns is None:
            self._interval_due_ns = Ns(now + self._interval_ns)
        elif now < self._load_due_ns:
            return
        if now >= self._interval_due_ns:
            for pool in self._pools.values():
                pool.close_interval(self._interval_ns)
                fade_strain(pool, self._interval_ns)
            self._interval_due_ns = Ns(now + self._interval_ns)
        self._decide(now, effects)
        self._load_due_ns = Ns(now + self._load_ns)
        effects.append(CallAt(self._load_due_ns, LOAD_TIMER))

    # ---- decisions

    def _decide(self, now: Ns, effects: list[AutoscalerEffect]) -> None:
        needs = {
            role: self._need(now, pool, pool.target)
            for role, pool in self._pools.items()
            if pool.target is not None
        }
        wanted = {role: self._bound(self._pools[role], need) for role, need in needs.items()}
        granted = grant(wanted, self._pools, self.config)
        self._switch(now, wanted, granted, effects)
        for role, need in needs.items():
            pool, num = self._pools[role], granted[role]
            if pool.target is None or num == pool.target:
                continue
            if num < pool.target <= need.num_replicas:
                need = need._replace(loop=Loop.LIMITS)
            reason = _reason(pool, need, num, is_limited=num < wanted[role])
            pool.ask(now, num)
            self._drain_surplus(pool, reason, effects)
            effects.append(Scale(role, num, reason))

    def _need(self, now: Ns, pool: Pool, target: int) -> Need:
        need = find_need(now, pool)
        if need is None:
            self._held.add(pool.role)
            need = Need(target, Loop.LIMITS)
        else:
            self._held.discard(pool.role)
        if need.num_replicas < self.config.min_replicas:
            return Need(self.config.min_replicas, Loop.LIMITS)
        return need

    def _bound(self, pool: Pool, need: Need) -> int:
        """What one decision may make of it."""
        target, config = pool.target or 0, self.config
        low = 0 if need.loop is Loop.IDLE else target - config.max_step_down
        return max(min(need.num_replicas, target + config.max_step_up), low)

    def _switch(
        self,
        now: Ns,
        wanted: Mapping[Role, int],
        granted: dict[Role, int],
        effects: list[AutoscalerEffect],
    ) -> None:
        """A replica that one pool can spare serves in the other one at once, and has its cache."""
        cooldown_ns = self.config.role_cooldown_s * NS_PER_S
        if self._switched_ns is not None and now - self._switched_ns < cooldown_ns:
            return
        for to_role, from_role in OTHER_ROLE.items():
            if to_role not in wanted or from_role not in wanted:
                continue
            giver, taker = self._pools[from_role], self._pools[to_role]
            is_leaving = granted[from_role] < (giver.target or 0)
            is_scarce = granted[to_role] < wanted[to_role]
            is_wanted = wanted[to_role] > (taker.target or 0) and (is_scarce or is_leaving)
            is_alike = giver.replica.num_gpus == taker.replica.num_gpus
            # The last one that decodes stays, also where a pool may sleep.
            can_go = len(giver.active) > (from_role is Role.DECODE)
            if is_wanted and is_alike and can_go and can_spare(now, giver):
                self._carry_over(now, giver, taker, wanted[to_role], effects)
                granted[from_role] = giver.target or 0
                granted[to_role] = max(granted[to_role], taker.target or 0)
                return

    def _carry_over(
        self, now: Ns, giver: Pool, taker: Pool, num_wanted: int, effects: list[AutoscalerEffect]
    ) -> None:
        (victim,) = giver.victims(1)
        reason = _reason(taker, Need(num_wanted, Loop.SWITCH), (taker.target or 0) + 1)
        self._move(now, victim, giver, taker)
        effects.append(SwitchRole(victim, giver.role, taker.role, reason))

    def _drain_surplus(self, pool: Pool, reason: Reason, effects: list[AutoscalerEffect]) -> None:
        """Those that have not come up yet are let go first, by the number alone."""
        if pool.target is None:
            return
        victims = pool.victims(max(0, len(pool.active) - pool.target))
        pool.leave(victims)
        effects += [Drain(pool.role, replica_id, reason) for replica_id in victims]


def _plain(pool: Pool, loop: Loop) -> Reason:
    return Reason(loop=loop, num_wanted=pool.target or 0)


def _reason(pool: Pool, need: Need, num_granted: int, *, is_limited: bool = False) -> Reason:
    capacity = pool.capacity
    rate = max(pool.demand or 0.0, pool.rate) * pool.strain

    def forecast(num_replicas: int) -> Forecast | None:
        return capacity.forecast(rate, num_replicas) if capacity and num_replicas else None

    return Reason(
        loop=need.loop,
        num_wanted=need.num_replicas,
        is_limited=is_limited,
        forecast=forecast(num_granted),
        forecast_before=forecast(pool.target or 0),
        predictor=pool.predictor.name,
    )
