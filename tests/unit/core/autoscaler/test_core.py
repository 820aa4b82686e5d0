from itertools import pairwise

import msgspec
import pytest

from headrace.core.autoscaler.events import (
    Constraint,
    Loop,
    Observe,
    ReplicaDown,
    RequestWaiting,
    Tick,
)
from headrace.core.base.errors import InvariantError
from headrace.core.base.events import CallAt, Timer
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from support.autoscaler_rig import MIXED, REPLICA, Rig, config, settled

QUEUE = {"queue_ms": 6000.0, "num_running": 8, "num_kv_tokens": 4000}


# ---- time


def test_the_first_event_begins_and_every_decision_asks_for_the_next() -> None:
    rig = Rig(config())
    assert CallAt(Ns(5 * NS_PER_S), 0) in rig.core.handle(Ns(0), Tick())
    assert rig.core.handle(Ns(3 * NS_PER_S), Tick()) == []
    assert rig.core.handle(Ns(5 * NS_PER_S), Timer(0)) == [CallAt(Ns(10 * NS_PER_S), 0)]


def test_time_does_not_go_back_and_pools_are_known() -> None:
    rig = Rig(config())
    rig.core.handle(Ns(5), Tick())
    with pytest.raises(InvariantError):
        rig.core.handle(Ns(4), Tick())
    with pytest.raises(InvariantError):
        rig.core.handle(Ns(5), RequestWaiting(Role.DECODE))


# ---- the throughput loop


def test_demand_beyond_what_replicas_can_do_asks_for_more_and_says_why() -> None:
    rig = Rig(config())
    rig.begin(1)
    rig.pass_time(65, rate=8.0, loads={})
    scale = next(one for one in rig.scales() if one.reason.loop is Loop.THROUGHPUT)
    reason = scale.reason
    assert reason.loop is Loop.THROUGHPUT
    assert reason.predictor == "constant"
    assert reason.forecast_before is not None
    assert reason.forecast is not None
    assert reason.forecast_before.pressure > reason.forecast.pressure
    assert reason.forecast_before.constraint is Constraint.RATE
    assert reason.forecast.rate_per_s == pytest.approx(8.0)
    assert reason.forecast.pressure <= 0.8
    assert reason.num_wanted == scale.num_replicas == reason.forecast.num_replicas


def test_a_rise_is_met_before_it_comes() -> None:
    """With the trend, and a start of three minutes, replicas are asked for at a load at which the
    constant predictor sees no need yet.
    """

    def asked_at(predictor: str) -> float:
        rig = Rig(config(predictor=predictor, start_up_s=180.0))
        rig.begin(1)
        while not rig.scales():
            rig.pass_time(5, rate=1.0 + rig.now_s / 1000)
        return rig.now_s

    assert asked_at("trend") < asked_at("constant") - 120


def test_what_starts_take_is_learned() -> None:
    rig = Rig(config(), start_s=200.0)
    rig.begin(1)
    rig.pass_time(400, rate=8.0, loads={"num_running": 1})
    assert rig.state().start_up_s > 60.0


def test_one_decision_adds_no_more_than_allowed() -> None:
    rig = Rig(config(max_step_up=2, max_replicas=20), start_s=1000.0)
    rig.begin(1)
    rig.pass_time(80, rate=30.0, loads={"num_running": 1})
    counts = [1, *(scale.num_replicas for scale in rig.scales())]
    assert max(after - before for before, after in pairwise(counts)) == 2
    assert counts[-1] > 8


# ---- the load loop


def test_queues_at_every_replica_that_will_not_drain_ask_for_more() -> None:
    rig = settled(2, 2.0)
    rig.pass_time(40, rate=7.0, loads=QUEUE)
    assert [scale.reason.loop for scale in rig.scales()][:1] == [Loop.LOAD]


def test_a_queue_that_is_gone_before_a_start_is_over_asks_for_nothing() -> None:
    rig = settled(2, 1.0)
    rig.pass_time(40, rate=1.0, loads=QUEUE)
    assert rig.scales() == []


def test_one_busy_replica_among_idle_ones_is_the_routers_matter() -> None:
    rig = settled(3, 4.0)
    rig.pass_time(40, rate=4.0, loads=[QUEUE, {}, {}])
    assert rig.scales() == []


def test_a_glance_is_not_enough() -> None:
    rig = settled(2, 2.0)
    rig.pass_time(5, rate=7.0, loads=QUEUE)
    rig.pass_time(20, rate=2.0)
    assert rig.scales() == []


def test_too_many_sequences_at_once_ask_for_more() -> None:
    rig = settled(2, 2.0)
    rig.pass_time(40, rate=2.0, loads={"num_running": 90, "num_kv_tokens": 45_000})
    assert rig.scales()[0].num_replicas == 3


def test_a_pool_that_is_exactly_full_asks_for_more() -> None:
    """No replica can run more than its most, so a full one is never above it."""
    rig = Rig(config(), replicas={MIXED: msgspec.structs.replace(REPLICA, max_running_seqs=8)})
    rig.begin(2)
    rig.pass_time(60, rate=0.2, loads={"num_running": 7, "num_kv_tokens": 3000})
    assert rig.scales() == []
    rig.pass_time(60, rate=0.2, loads={"num_running": 8, "num_kv_tokens": 3500})
    assert rig.scales()[0].reason.loop is Loop.LOAD


def test_replicas_on_their_way_count() -> None:
    rig = settled(2, 2.0, start_up_s=30.0)
    rig.start_s = 100.0
    rig.pass_time(100, rate=5.0, loads={"num_running": 70, "num_kv_tokens": 35_000})
    counts = [scale.num_replicas for scale in rig.scales()]
    assert len(counts) == 1


# ---- down


def test_fewer_only_where_fewer_hold_the_whole_load() -> None:
    """2 · load / 2 on one replica would be above the limits, so two stay."""
    rate = 3.2
    rig = settled(2, rate)
    capacity = rig.core._pools[MIXED].capacity
    assert capacity is not None
    assert capacity.forecast(rate, 2).pressure < 0.45
    assert capacity.forecast(rate, 1).pressure > 0.8
    rig.pass_time(1000, rate=rate)
    assert rig.scales() == []


def test_load_that_would_not_fit_on_fewer_keeps_them() -> None:
    """Consolidation by state: few requests come, but those that run are long."""
    rig = settled(3, 0.5, seconds=50.0)
    rig.pass_time(900, rate=0.5, loads={"num_running": 22, "num_kv_tokens": 11_000})
    assert rig.effects == []


def test_the_surplus_goes_one_by_one_after_a_while() -> None:
    rig = settled(4, 0.5, seconds=50.0)
    assert rig.target == 4
    rig.pass_time(300, rate=0.5)
    assert [scale.num_replicas for scale in rig.scales()] == [3, 2, 1]
    assert len(rig.drains()) == 3
    assert {scale.reason.loop for scale in rig.scales()} == {Loop.THROUGHPUT}


def test_nobody_else_leaves_while_one_drains() -> None:
    rig = settled(4, 0.5, seconds=50.0)
    rig.lingers = True
    rig.pass_time(600, rate=0.5)
    assert rig.target == 3
    rig.go(MIXED, rig.draining[MIXED][0])
    rig.pass_time(100, rate=0.5)
    assert rig.target == 2


def test_the_one_with_the_least_cached_leaves_then_the_least_loaded() -> None:
    loads = [
        {"num_cached_tokens": 900, "num_running": 0},
        {"num_cached_tokens": 100, "num_running": 2},
        {"num_cached_tokens": 100, "num_running": 1},
    ]
    rig = settled(3, 0.5, seconds=50.0)
    rig.pass_time(75, rate=0.5, loads=loads)
    assert [drain.replica_id for drain in rig.drains()][:1] == [3]


def test_what_has_not_come_up_is_let_go_without_a_drain() -> None:
    rig = settled(1, 1.0)
    rig.start_s = 1e6
    rig.pass_time(65, rate=8.0)
    assert (rig.target or 0) > 2
    rig.pass_time(900, rate=0.5)
    assert rig.target == 1
    assert rig.drains() == []
    assert rig.starting == []


# ---- limits


def test_the_budget_counts_all_pools_and_those_that_drain() -> None:
    gpus = {
        Role.PREFILL: REPLICA,
        Role.DECODE: type(REPLICA)(cost=REPLICA.cost, num_gpus=2),
    }
    rig = Rig(config(max_gpus=9, max_replicas=100, max_step_up=100), replicas=gpus)
    rig.begin(1, Role.PREFILL)
    rig.begin(1, Role.DECODE)
    rig.pass_time(300, rate=200.0)
    prefill, decode = (rig.state(role).num_wanted or 0 for role in gpus)
    assert prefill + 2 * decode <= 9
    assert min(prefill, decode) >= 2
    assert rig.effects
    last = rig.scales(Role.PREFILL)[-1].reason
    assert last.is_limited
    assert last.num_wanted > prefill


def test_what_drains_is_still_paid_for() -> None:
    rig = settled(3, 0.5, seconds=50.0, max_replicas=3)
    rig.lingers = True
    rig.pass_time(75, rate=0.5)
    assert rig.target == 2
    rig.pass_time(200, rate=20.0)
    assert rig.target == 2
    rig.go(MIXED, rig.draining[MIXED][0])
    rig.pass_time(20, rate=20.0)
    assert rig.target == 3


def test_a_fleet_above_the_budget_shrinks_at_once() -> None:
    rig = Rig(config(max_replicas=2))
    rig.begin(5)
    rig.pass_time(5, rate=9.0)
    assert rig.target == 2
    assert rig.scales()[0].reason.loop is Loop.LIMITS
    assert len(rig.drains()) == 3


def test_the_minimum_is_there_without_any_load() -> None:
    rig = Rig(config(min_replicas=2))
    rig.pass_time(10)
    assert rig.target == 2
    assert rig.scales()[0].reason.loop is Loop.LIMITS
    rig.pass_time(2000)
    assert rig.target == 2


def test_a_replica_that_dies_is_replaced() -> None:
    rig = settled(2, 3.0)
    rig.go(MIXED, WorkerId(1))
    (scale,) = rig.scales()
    assert (scale.num_replicas, scale.reason.loop) == (2, Loop.REPLACE)
    assert rig.tell(ReplicaDown(MIXED, WorkerId(99))) == []


# ---- what is not known


def test_without_news_everything_stays() -> None:
    rig = settled(3, 6.0)
    rig.pass_time(3000, told=False)
    assert rig.effects == []
    assert rig.state().is_held
    rig.pass_time(100, rate=6.0)
    assert rig.effects == []
    assert not rig.state().is_held


def test_old_news_is_no_news() -> None:
    rig = settled(3, 6.0)
    rig.pass_time(600, rate=0.1, age_ns=Ns(60 * NS_PER_S))
    assert rig.effects == []


def test_a_window_of_no_length_tells_nothing() -> None:
    rig = Rig(config())
    rig.tell(Observe(rig.window(rate=1.0, loads={}).__class__(role=MIXED, span_ns=Ns(0))))
    assert rig.target is None


def test_a_new_autoscaler_takes_the_fleet_as_it_is() -> None:
    rig = Rig(config(down_delay_s=300.0), start_s=200.0)
    rig.begin(4)
    rig.starting.append((100.0, MIXED))
    rig.pass_time(250, rate=0.5)
    assert rig.effects == []
    assert rig.target == 5
