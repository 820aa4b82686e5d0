"""An AutoscalerCore with a hand on everything that it sees: a made-up fleet that obeys at once or
late, and windows as a test wants them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.core.autoscaler.capacity import Replica
from headrace.core.autoscaler.core import AutoscalerCore, PoolState
from headrace.core.autoscaler.events import (
    AutoscalerEffect,
    AutoscalerEvent,
    Drain,
    Observe,
    PoolWindow,
    Quantiles,
    ReplicaDown,
    ReplicaLoad,
    ReplicaUp,
    RoleSwitched,
    Scale,
    SwitchRole,
    Tick,
)
from headrace.core.base.events import CallAt
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.cost.fitted import FittedCostModel

SLO = Slo(ttft_ms=2000.0, itl_ms=50.0)
REPLICA = Replica(cost=FittedCostModel.prior())
MIXED = Role.MIXED


def latency(ms: float) -> Quantiles:
    return Quantiles(ms, ms, ms)


@dataclass
class Rig:
    """Replicas come up `start_s` after they were asked for, and drained ones leave at once or,
    with `lingers`, when the test says so.
    """

    config: AutoscalerConfig
    replicas: dict[Role, Replica] = field(default_factory=lambda: {MIXED: REPLICA})
    slo: Slo = SLO
    start_s: float = 0.0
    lingers: bool = False
    now_s: float = 0.0
    next_id: int = 1
    up: dict[Role, list[WorkerId]] = field(default_factory=dict)
    draining: dict[Role, list[WorkerId]] = field(default_factory=dict)
    starting: list[tuple[float, Role]] = field(default_factory=list)
    effects: list[AutoscalerEffect] = field(default_factory=list)  # but CallAt
    most_held: int = 0

    def __post_init__(self) -> None:
        self.core = AutoscalerCore(self.config, self.slo, self.replicas)
        self.up = {role: [] for role in self.replicas}
        self.draining = {role: [] for role in self.replicas}
        self.switching: dict[WorkerId, Role] = {}  # with what they were

    # ---- what happens

    def begin(self, num: int = 1, role: Role = MIXED) -> None:
        """So many serve already."""
        for _ in range(num):
            self.come_up(role)

    def come_up(self, role: Role) -> None:
        replica_id = WorkerId(self.next_id)
        self.next_id += 1
        self.up[role].append(replica_id)
        self.tell(ReplicaUp(role, replica_id))

    def go(self, role: Role, replica_id: WorkerId) -> None:
        for members in (self.up[role], self.draining[role]):
            if replica_id in members:
                members.remove(replica_id)
        self.tell(ReplicaDown(self.switching.pop(replica_id, role), replica_id))

    def switch(self, replica_id: WorkerId, from_role: Role, to_role: Role) -> None:
        """At once, or where the driver lingers, when `end_switches` says so."""
        self.up[from_role].remove(replica_id)
        self.up[to_role].append(replica_id)
        self.switching[replica_id] = from_role
        if not self.lingers:
            self.end_switches()

    def end_switches(self) -> None:
        for replica_id, from_role in list(self.switching.items()):
            to_role = next(role for role, members in self.up.items() if replica_id in members)
            del self.switching[replica_id]
            self.tell(RoleSwitched(replica_id, from_role, to_role))

    def tell(self, event: AutoscalerEvent) -> list[AutoscalerEffect]:
        effects = self.core.handle(Ns(round(self.now_s * NS_PER_S)), event)
        told: list[AutoscalerEffect] = [
            effect for effect in effects if not isinstance(effect, CallAt)
        ]
        self.effects += told
        for effect in told:
            self.obey(effect)
        self.core.check()
        return told

    def obey(self, effect: AutoscalerEffect) -> None:
        match effect:
            case Scale(role, num):
                pending = sum(one is role for _, one in self.starting)
                for _ in range(num - len(self.up[role]) - pending):
                    self.starting.append((self.now_s + self.start_s, role))
                for _ in range(len(self.up[role]) + pending - num):
                    self.starting.remove(next(one for one in self.starting if one[1] is role))
            case SwitchRole(replica_id, from_role, to_role):
                self.switch(replica_id, from_role, to_role)
            case Drain(role, replica_id):
                self.up[role].remove(replica_id)
                self.draining[role].append(replica_id)
                if not self.lingers:
                    self.go(role, replica_id)

    def pass_time(self, seconds: float, *, told: bool = True, **figures: Any) -> None:
        """Windows of 5 s with these figures, and ticks."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 5.0
            due = [one for one in self.starting if one[0] <= self.now_s]
            for one in due:  # the others are still on their way when the core hears of one
                if one in self.starting:  # which may be too many by then
                    self.starting.remove(one)
                    self.come_up(one[1])
            if told:
                for role in self.replicas:
                    self.tell(Observe(self.window(role=role, **figures)))
            self.tell(Tick())
            held = sum(map(len, [*self.up.values(), *self.draining.values()]))
            self.most_held = max(self.most_held, held + len(self.starting))

    def window(
        self,
        *,
        role: Role = MIXED,
        rate: float = 0.0,
        prompt: float = 400.0,
        output: float = 100.0,
        loads: Sequence[dict[str, Any]] | dict[str, Any] = (),
        **figures: Any,
    ) -> PoolWindow:
        """`loads` are the figures of each replica, or those of all alike."""
        ids = [*self.up[role], *self.draining[role]]
        each = [loads] * len(ids) if isinstance(loads, dict) else [*loads] + [{}] * len(ids)
        # Where the load does not say otherwise, requests are spread evenly.
        usual = {"num_running": round(rate / max(1, len(ids)))}
        return PoolWindow(
            role=role,
            span_ns=Ns(5 * NS_PER_S),
            num_arrivals=round(5 * rate),
            prompt_tokens=prompt,
            output_tokens=output,
            num_starting=sum(one is role for _, one in self.starting),
            num_draining=len(self.draining[role]),
            replicas=tuple(
                ReplicaLoad(replica_id=replica_id, **{**usual, **figures})
                for replica_id, figures in zip(ids, each, strict=False)
            ),
            **figures,
        )

    # ---- what came of it

    def state(self, role: Role = MIXED) -> PoolState:
        return next(state for state in self.core.state() if state.role is role)

    @property
    def target(self) -> int | None:
        return self.state().num_wanted

    def scales(self, role: Role = MIXED) -> list[Scale]:
        return [one for one in self.effects if isinstance(one, Scale) and one.role is role]

    def drains(self) -> list[Drain]:
        return [one for one in self.effects if isinstance(one, Drain)]


def config(**changes: Any) -> AutoscalerConfig:
    """The defaults, with a little less patience."""
    patient = AutoscalerConfig(warm_up_s=10.0, down_delay_s=60.0, breach_s=10.0, start_up_s=30.0)
    return replace(patient, **changes)


def settled(num: int, rate: float, seconds: float = 200.0, **changes: Any) -> Rig:
    """A pool that has had this load for long enough that everything is known."""
    rig = Rig(config(**changes))
    rig.begin(num)
    rig.pass_time(seconds, rate=rate)
    rig.effects.clear()
    return rig
