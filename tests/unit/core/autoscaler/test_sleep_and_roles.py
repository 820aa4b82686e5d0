from typing import Any

from headrace.core.autoscaler.events import (
    Drain,
    Loop,
    ReplicaDown,
    RequestWaiting,
    Scale,
    SwitchRole,
)
from headrace.core.base.types import WorkerId
from headrace.core.base.worker import Role
from support.autoscaler_rig import MIXED, REPLICA, Rig, config

# ---- sleep


def asleep() -> Rig:
    rig = Rig(config(min_replicas=0, idle_s=100.0), start_s=20.0)
    rig.begin(1)
    rig.pass_time(100, rate=1.0)
    rig.pass_time(700)
    assert rig.target == 0
    return rig


def test_nobody_asks_and_the_pool_goes_to_sleep() -> None:
    rig = asleep()
    assert rig.scales()[-1].reason.loop is Loop.IDLE
    assert len(rig.drains()) == 1
    rig.pass_time(1000)
    assert rig.target == 0


def test_a_request_wakes_it_at_once_even_without_news() -> None:
    rig = asleep()
    rig.pass_time(1000, told=False)
    (scale,) = rig.tell(RequestWaiting(MIXED))
    assert isinstance(scale, Scale)
    assert (scale.num_replicas, scale.reason.loop) == (1, Loop.WAKE)
    assert rig.tell(RequestWaiting(MIXED)) == []
    rig.pass_time(25, num_waiting=1)
    assert len(rig.up[MIXED]) == 1
    rig.pass_time(50, rate=0.2)
    assert rig.target == 1


def test_whoever_woke_for_nothing_sleeps_again() -> None:
    rig = asleep()
    rig.tell(RequestWaiting(MIXED))
    rig.pass_time(90)
    assert rig.target == 1
    rig.pass_time(400)
    assert rig.target == 0


def test_work_that_runs_is_no_idleness() -> None:
    rig = Rig(config(min_replicas=0, idle_s=100.0))
    rig.begin(1)
    rig.pass_time(100, rate=1.0)
    rig.pass_time(1000, loads={"num_running": 1})
    assert rig.target == 1


def test_a_season_wakes_it_before_the_first_request() -> None:
    """An hour of quiet, an hour of work, with a season of two hours."""
    rig = Rig(
        config(
            min_replicas=0, idle_s=300.0, predictor="seasonal", season_s=7200.0, start_up_s=120.0
        )
    )
    rig.begin(1)
    for _ in range(3):
        rig.pass_time(3600, rate=2.0)
        rig.pass_time(3600)
    waked = [one for one in rig.scales() if one.reason.loop is Loop.THROUGHPUT and one.num_replicas]
    assert waked
    assert all(one.num_replicas == 1 for one in waked)


# ---- roles


def disaggregated(**changes: Any) -> Rig:
    rig = Rig(config(**changes), replicas={Role.PREFILL: REPLICA, Role.DECODE: REPLICA})
    rig.begin(3, Role.PREFILL)
    rig.begin(1, Role.DECODE)
    return rig


def test_a_full_budget_moves_a_replica_to_where_it_is_needed() -> None:
    rig = disaggregated(max_replicas=4)
    rig.pass_time(120, rate=1.0, output=2000.0, loads={"num_running": 90, "num_kv_tokens": 90_000})
    switch = next(one for one in rig.effects if isinstance(one, SwitchRole))
    assert (switch.from_role, switch.to_role) == (Role.PREFILL, Role.DECODE)
    assert switch.reason.loop is Loop.SWITCH
    assert len(rig.up[Role.DECODE]) == rig.state(Role.DECODE).num_wanted == 2
    assert len(rig.up[Role.PREFILL]) == rig.state(Role.PREFILL).num_wanted == 2
    assert not any(isinstance(one, Drain) for one in rig.effects)


def test_roles_do_not_swing() -> None:
    rig = disaggregated(max_replicas=4, role_cooldown_s=1e6)
    rig.pass_time(600, rate=1.0, output=2000.0, loads={"num_running": 90, "num_kv_tokens": 90_000})
    assert sum(isinstance(one, SwitchRole) for one in rig.effects) == 1


def test_a_switch_that_never_arrives_is_made_good() -> None:
    rig = disaggregated(max_replicas=4)
    pools = rig.core._pools
    pools[Role.PREFILL].target, pools[Role.DECODE].target = 2, 2
    pools[Role.PREFILL].leave([WorkerId(1)], Role.DECODE)
    pools[Role.DECODE].arriving.add(WorkerId(1))
    (scale,) = rig.tell(ReplicaDown(Role.PREFILL, WorkerId(1)))
    assert isinstance(scale, Scale)
    assert (scale.role, scale.num_replicas) == (Role.DECODE, 2)


def test_an_operators_switch_stays_and_delays_the_next_one() -> None:
    rig = disaggregated(max_replicas=4, role_cooldown_s=600.0)
    rig.pass_time(30, rate=1.0)
    rig.switch(WorkerId(1), Role.PREFILL, Role.DECODE)
    assert [rig.state(role).num_wanted for role in (Role.PREFILL, Role.DECODE)] == [2, 2]
    rig.pass_time(300, rate=1.0, output=2000.0, loads={"num_running": 90, "num_kv_tokens": 90_000})
    assert not any(isinstance(one, SwitchRole) for one in rig.effects)
    assert WorkerId(1) in rig.up[Role.DECODE]


def test_an_operators_switch_before_anything_is_known() -> None:
    rig = disaggregated(max_replicas=4)
    rig.switch(WorkerId(1), Role.PREFILL, Role.DECODE)
    rig.pass_time(10, rate=1.0)
    assert [rig.state(role).num_active for role in (Role.PREFILL, Role.DECODE)] == [2, 2]
    assert [rig.state(role).num_wanted for role in (Role.PREFILL, Role.DECODE)] == [2, 2]


def test_a_switch_takes_no_time_to_start() -> None:
    """And says nothing about how long a start takes."""
    rig = disaggregated(max_replicas=4, start_up_s=120.0)
    before = rig.state(Role.DECODE).start_up_s
    rig.pass_time(120, rate=1.0, output=2000.0, loads={"num_running": 90, "num_kv_tokens": 90_000})
    assert any(isinstance(one, SwitchRole) for one in rig.effects)
    assert rig.starting == []
    assert rig.state(Role.DECODE).start_up_s == before == 120.0
