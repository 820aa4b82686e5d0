import pytest

from headrace.core.autoscaler.capacity import Capacity, Replica, Traffic, fewest
from headrace.core.autoscaler.events import Constraint
from headrace.core.base.request import Slo
from headrace.core.cost.fitted import FittedCostModel

COST = FittedCostModel.prior()
REPLICA = Replica(cost=COST)
CHAT = Traffic(400.0, 300.0, 100.0)
SLO = Slo(ttft_ms=2000.0, itl_ms=50.0)


def capacity(
    traffic: Traffic = CHAT, slo: Slo = SLO, percentile: str = "p90", replica: Replica = REPLICA
) -> Capacity:
    return Capacity(replica, traffic, slo, percentile=percentile, margin=0.2)


def test_the_fewest_that_are_enough() -> None:
    assert [fewest(lambda n: n >= 5, 1, high) for high in (3, 5, 9)] == [3, 5, 5]


def test_more_requests_press_more_and_more_replicas_less() -> None:
    answers = capacity()
    rising = [answers.forecast(rate, 2).pressure for rate in (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)]
    assert rising == sorted(rising)
    falling = [answers.forecast(6.0, n).pressure for n in (1, 2, 3, 4, 8)]
    assert falling == sorted(falling, reverse=True)


def test_replicas_grow_with_the_rate_and_are_just_enough() -> None:
    answers = capacity()
    needs = [answers.replicas_for(rate, 50) for rate in (0.0, 0.1, 3.0, 6.0, 20.0, 60.0)]
    assert needs == sorted(needs)
    assert needs[:2] == [0, 1]
    for rate, n in ((6.0, needs[3]), (20.0, needs[4]), (60.0, needs[5])):
        with_margin = rate / 0.8
        assert answers.forecast(with_margin, n).pressure <= 1.0
        assert answers.forecast(with_margin, n - 1).pressure > 1.0


def test_no_count_is_enough_beyond_what_there_may_be() -> None:
    assert capacity().replicas_for(1000.0, 7) == 7


def test_a_stricter_percentile_needs_more() -> None:
    tight = Slo(ttft_ms=600.0, itl_ms=50.0)
    needs = [
        capacity(slo=tight, percentile=p).replicas_for(20.0, 50) for p in ("p50", "p90", "p99")
    ]
    assert needs == sorted(needs)
    assert needs[0] < needs[2]


def test_cached_prompts_need_fewer() -> None:
    cold = capacity(Traffic(400.0, 400.0, 100.0)).replicas_for(20.0, 50)
    warm = capacity(Traffic(400.0, 40.0, 100.0)).replicas_for(20.0, 50)
    assert warm < cold


def test_a_decode_pool_is_bound_by_itl_and_a_prefill_pool_by_ttft() -> None:
    decode = capacity(Traffic(400.0, 0.0, 400.0), Slo(itl_ms=50.0))
    assert decode.forecast(6.0, 1).constraint is Constraint.ITL
    prefill = capacity(Traffic(400.0, 400.0, 0.0), Slo(ttft_ms=2000.0))
    assert prefill.forecast(4.2, 1).constraint is Constraint.TTFT


@pytest.mark.parametrize(
    ("replica", "constraint"),
    [
        (Replica(cost=COST, max_running_seqs=4), Constraint.SEQS),
        (Replica(cost=COST, num_kv_tokens=2000), Constraint.KV),
    ],
)
def test_room_for_sequences_binds_too(replica: Replica, constraint: Constraint) -> None:
    assert capacity(replica=replica).forecast(2.5, 1).constraint is constraint


def test_a_limit_that_nobody_can_keep_asks_for_no_replica() -> None:
    long = Traffic(40_000.0, 40_000.0, 100.0)
    answers = capacity(long, Slo(ttft_ms=2000.0, itl_ms=500.0))
    assert answers.unreachable == {Constraint.TTFT}
    alone = answers.forecast(0.0001, 1)
    assert alone.ttft_ms > 2000.0
    assert alone.pressure < 0.5
    assert answers.replicas_for(0.0001, 50) == 1
    assert capacity(slo=Slo(ttft_ms=2000.0, itl_ms=1.0)).unreachable == {Constraint.ITL}


def test_a_replica_as_it_stands() -> None:
    answers = capacity()
    assert answers.state_pressure(0.0, 0, 0) < 0.2
    assert answers.state_pressure(2500.0, 0, 0) > 1.0
    assert answers.state_pressure(0.0, 60, 60 * 500) > 1.0
