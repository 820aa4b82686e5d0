"""Laws of the autoscaler, whatever happens: never above the budget, never below the minimum, no
change without data, no swinging under constant load, and always the same answer.
"""

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.autoscaler.capacity import Replica
from headrace.core.autoscaler.core import OTHER_ROLE
from headrace.core.autoscaler.events import RequestWaiting, Scale, SwitchRole
from headrace.core.base.worker import Role
from headrace.core.cost.fitted import FittedCostModel
from support.autoscaler_rig import Rig, config, latency

COST = FittedCostModel.prior()
POOLS = {
    Role.MIXED: Replica(cost=COST, num_gpus=1),
    Role.PREFILL: Replica(cost=COST, num_gpus=2),
    Role.DECODE: Replica(cost=COST, num_gpus=2),
}
BUDGET = {"max_replicas": 7, "max_gpus": 10}

rates = st.floats(0.0, 40.0)
loads = st.fixed_dictionaries(
    {
        "queue_ms": st.floats(0.0, 30_000.0),
        "num_running": st.integers(0, 300),
        "num_kv_tokens": st.integers(0, 100_000),
        "num_cached_tokens": st.integers(0, 1000),
        "num_samples": st.integers(1, 200),
        "num_good": st.integers(0, 1),
        "ttft_ms": st.floats(0.0, 1e5).map(latency),
        "itl_ms": st.floats(0.0, 1e3).map(latency),
    }
)


class Fleet(RuleBasedStateMachine):
    """Loads come and go, replicas die, are late, and linger; news is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(config(down_delay_s=20.0, **BUDGET), replicas=POOLS)
        for role in POOLS:
            self.rig.begin(1, role)
        self.rig.pass_time(5.0)

    def roles(self) -> list[Role]:
        return [role for role in POOLS if self.rig.up[role]]

    @rule(seconds=st.integers(5, 150), rate=rates, figures=loads)
    def work(self, seconds: int, rate: float, figures: dict[str, Any]) -> None:
        self.rig.pass_time(seconds, rate=rate, loads=figures)

    @rule(seconds=st.integers(40, 200), rate=rates)
    def lose_the_news(self, seconds: int, rate: float) -> None:
        self.rig.pass_time(35.0, told=False)
        before = list(self.rig.effects)
        self.rig.pass_time(seconds, told=False)
        assert self.rig.effects == before

    @rule(start_s=st.sampled_from([0.0, 30.0, 300.0]), lingers=st.booleans())
    def change_the_driver(self, start_s: float, lingers: bool) -> None:
        self.rig.start_s, self.rig.lingers = start_s, lingers

    @precondition(lambda self: self.roles())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        role = data.draw(st.sampled_from(self.roles()))
        self.rig.go(role, data.draw(st.sampled_from(self.rig.up[role])))

    @rule()
    def end_drains(self) -> None:
        for role, members in self.rig.draining.items():
            for replica_id in list(members):
                self.rig.go(role, replica_id)

    @rule()
    def end_switches(self) -> None:
        self.rig.end_switches()

    @precondition(lambda self: self.movable())
    @rule(data=st.data())
    def switch(self, data: st.DataObject) -> None:
        """As an operator does."""
        role = data.draw(st.sampled_from(self.movable()))
        self.rig.switch(self.rig.up[role][-1], role, OTHER_ROLE[role])
        self.rig.end_switches()

    def movable(self) -> list[Role]:
        """Roles of which one may leave, whom nobody has asked to."""
        return [
            role
            for role in OTHER_ROLE
            if len(self.rig.up[role]) > 1
            and self.rig.state(role).num_active == len(self.rig.up[role])
        ]

    @rule(role=st.sampled_from(list(POOLS)))
    def ask(self, role: Role) -> None:
        self.rig.tell(RequestWaiting(role))

    @invariant()
    def nobody_is_above_the_budget(self) -> None:
        rig = self.rig
        num = num_gpus = 0
        for role, replica in POOLS.items():
            pending = sum(one is role for _, one in rig.starting)
            held = len(rig.up[role]) + len(rig.draining[role]) + pending
            num += held
            num_gpus += held * replica.num_gpus
        assert num <= BUDGET["max_replicas"]
        assert num_gpus <= BUDGET["max_gpus"]

    @invariant()
    def nobody_is_below_the_minimum(self) -> None:
        for role in POOLS:
            assert (self.rig.state(role).num_wanted or 0) >= 1

    @invariant()
    def what_is_wanted_is_there_or_on_its_way(self) -> None:
        for role in POOLS:
            pending = sum(one is role for _, one in self.rig.starting)
            assert len(self.rig.up[role]) + pending == self.rig.state(role).num_wanted


Fleet.TestCase.settings = settings(max_examples=10, stateful_step_count=10, deadline=None)
TestFleet = Fleet.TestCase


def test_what_is_only_now_to_drain_is_paid_for_as_well() -> None:
    """One pool grows in the very decision that another one shrinks in, and takes its time to."""
    rig = Rig(config(down_delay_s=20.0, **BUDGET), replicas=POOLS)
    for role in POOLS:
        rig.begin(1, role)
    rig.pass_time(5)
    rig.pass_time(45, rate=1.0, loads={"num_running": 96, "num_samples": 1, "num_good": 0})
    rig.lingers, rig.start_s = True, 0.0
    slow: dict[str, Any] = {
        "queue_ms": 4845.0,
        "num_running": 32,
        "num_samples": 200,
        "num_good": 0,
    }
    slow |= {"ttft_ms": latency(10_853.0), "itl_ms": latency(1000.0), "num_cached_tokens": 40}
    rig.pass_time(30, rate=0.0, loads=slow)
    assert rig.drains()
    assert rig.most_held <= BUDGET["max_replicas"]


@given(rate=st.floats(0.2, 20.0), num=st.integers(1, 8))
@settings(max_examples=5, deadline=None)
def test_under_constant_load_the_fleet_comes_to_rest(rate: float, num: int) -> None:
    """And goes only one way to get there."""
    rig = Rig(config())
    rig.begin(num)
    rig.pass_time(900, rate=rate)
    counts = [num, *(one.num_replicas for one in rig.scales())]
    assert counts in (sorted(counts), sorted(counts, reverse=True))
    settled = len(rig.effects)
    rig.pass_time(900, rate=rate)
    assert len(rig.effects) == settled


@given(script=st.lists(st.tuples(rates, loads), min_size=1, max_size=6))
@settings(max_examples=5, deadline=None)
def test_the_same_events_have_the_same_effects(script: list[tuple[float, dict[str, Any]]]) -> None:
    rigs = [Rig(config(**BUDGET), replicas=POOLS) for _ in range(2)]
    for rig in rigs:
        for role in POOLS:
            rig.begin(1, role)
        for rate, figures in script:
            rig.pass_time(60, rate=rate, loads=figures)
    assert rigs[0].effects == rigs[1].effects


@given(script=st.lists(st.tuples(rates, loads), min_size=1, max_size=6))
@settings(max_examples=5, deadline=None)
def test_no_decision_changes_more_than_it_may(script: list[tuple[float, dict[str, Any]]]) -> None:
    rig = Rig(config(max_step_up=2, max_step_down=1, max_replicas=30))
    rig.begin(1)
    rig.pass_time(5)
    for rate, figures in script:
        rig.pass_time(100, rate=rate, loads=figures)
    counts = [1, *(one.num_replicas for one in rig.effects if isinstance(one, Scale))]
    assert all(-1 <= after - before <= 2 for before, after in pairwise(counts))
    assert not any(isinstance(one, SwitchRole) for one in rig.effects)
