"""Workers of one machine are as fast as each other, whatever each has measured at its start."""

import pytest

from headrace.core.base.types import WorkerId
from headrace.core.base.worker import Role
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import StepShape
from support.routing import Routing, names, spec

COST = FittedCostModel.prior()
# As three workers were calibrated that started at once on two cores.
SLOWNESS = (1.4, 1.0, 2.05)


def routing_of(*machines: str) -> Routing:
    routing = Routing()
    for worker_id, machine in enumerate(machines):
        cost = COST.slower(SLOWNESS[worker_id])
        routing.up(worker_id, machine=machine, cost=cost)
    return routing


def homes(routing: Routing) -> list[int]:
    """Of three long prompts that overlap."""
    return [routing.place(names(str(number), 64)).worker_id for number in range(3)]


def test_long_prompts_go_to_those_that_are_idle() -> None:
    assert sorted(homes(routing_of("m", "m", "m"))) == [0, 1, 2]


def test_a_slow_machine_is_slow() -> None:
    """Two of them are sooner computed by the quick one, one after the other."""
    assert homes(routing_of("m", "n", "o"))[:2] == [1, 0]
    assert 2 not in homes(routing_of("m", "n", "o"))
    assert 2 not in homes(routing_of("", "", ""))


def test_a_prefill_worker_is_as_fast_as_the_others_of_its_machine() -> None:
    routing = Routing()
    routing.up(0, machine="m", cost=COST, role=Role.DECODE)
    routing.up(1, machine="m", cost=COST.slower(2.7), role=Role.PREFILL)
    there, here = (
        routing.core.quote(routing.now, routing.request(names("a", 64), role=role))
        for role in (Role.PREFILL, Role.MIXED)
    )
    assert there is not None
    assert here is not None
    assert there.total_ns == here.total_ns


@pytest.mark.parametrize(
    "fields", [{"step_tokens": 64}, {"spec": spec(model_digest="other")}, {"machine": "n"}]
)
def test_others_are_judged_by_themselves(fields: dict[str, object]) -> None:
    routing = Routing()
    routing.up(0, machine="m", cost=COST)
    routing.up(1, **{"machine": "m", "cost": COST.slower(3), **fields})  # type: ignore[arg-type]
    first, second = (routing.place(names(str(i), 64)).decision.chosen for i in range(2))
    assert second.prefill_ms > 2 * first.prefill_ms or second.worker_id == first.worker_id


def test_work_that_is_booked_stays_booked_when_a_quicker_one_comes() -> None:
    routing = Routing()
    routing.up(0, machine="m", cost=COST.slower(2))
    due = routing.place(names("a", 64)).decision.chosen.prefill_ms
    routing.up(1, machine="m", cost=COST)
    assert routing.core.due_ns(routing.now, 0) / 1e6 == pytest.approx(due)  # type: ignore[arg-type]
    routing.down(1)
    routing.serve(1)
    assert routing.place(names("b", 64)).decision.chosen.prefill_ms == pytest.approx(
        due / 2, rel=0.01
    )


FULL_NS = COST.step_ns(StepShape(512, 0, 0, 0, 0))


def prefill_ms(routing: Routing, worker_id: int) -> float:
    """Of a long prompt that only this one may take."""
    others = tuple(WorkerId(other) for other in range(3) if other != worker_id)
    dispatch = routing.place(names(f"{worker_id} {routing.now}", 64), excluded=others)
    routing.serve(dispatch.request_id)
    return dispatch.decision.chosen.prefill_ms


def test_a_machine_that_was_measured_too_low_is_as_slow_as_all_its_workers_find() -> None:
    routing = routing_of("m", "m", "m")  # the second one measured 1
    first = prefill_ms(routing, 0)
    routing.stats(0, full_step_ns=FULL_NS * 3)
    routing.stats(2, full_step_ns=FULL_NS * 3.2)
    assert prefill_ms(routing, 0) == pytest.approx(first)  # the second one may be right
    routing.stats(1, full_step_ns=FULL_NS * 2.5)
    for worker_id in range(3):
        assert prefill_ms(routing, worker_id) == pytest.approx(2.5 * first, rel=0.01)
    routing.stats(2, full_step_ns=FULL_NS * 1.5)  # and it is told again when it gets quicker
    assert prefill_ms(routing, 0) == pytest.approx(1.5 * first, rel=0.01)
    assert sorted(homes(routing)) == [0, 1, 2]


def test_one_that_comes_later_is_believed_until_it_has_computed() -> None:
    routing = Routing()
    routing.up(0, machine="m", cost=COST.slower(3))
    slow = prefill_ms(routing, 0)
    routing.up(1, machine="m", cost=COST)
    routing.stats(0, full_step_ns=FULL_NS * 3)
    assert prefill_ms(routing, 0) == pytest.approx(slow / 3, rel=0.01)
    routing.stats(1, full_step_ns=FULL_NS * 3.1)
    assert prefill_ms(routing, 0) == pytest.approx(slow, rel=0.04)


def test_what_steps_of_one_machine_take_says_nothing_of_another() -> None:
    routing = routing_of("m", "n", "")
    before = [prefill_ms(routing, worker_id) for worker_id in range(3)]
    routing.stats(0, full_step_ns=FULL_NS * 14)
    after = [prefill_ms(routing, worker_id) for worker_id in range(3)]
    assert after == [pytest.approx(10 * before[0], rel=0.01), *before[1:]]


@pytest.mark.parametrize("told", [0, 1.05 * FULL_NS, -1.0, float("nan"), float("inf")])
def test_figures_that_are_none_or_no_news_change_nothing(told: float) -> None:
    routing = Routing()
    routing.up(0, machine="m", cost=COST)
    predictors = routing.core._fleet.predictors
    routing.stats(0, full_step_ns=told)
    assert routing.core._fleet.predictors is predictors


@pytest.mark.parametrize("told", [3.0, 3.5])  # of which the first is no news
def test_one_that_is_gone_is_believed_no_longer_than_nobody_else_knows(told: float) -> None:
    routing = Routing()
    routing.up(0, machine="m", cost=COST.slower(3))
    slow = prefill_ms(routing, 0)
    routing.up(1, machine="m", cost=COST)
    routing.down(1)
    assert prefill_ms(routing, 0) == pytest.approx(slow / 3, rel=0.01)
    routing.up(2, machine="m", cost=COST)
    routing.stats(0, full_step_ns=FULL_NS * told)
    assert prefill_ms(routing, 0) == pytest.approx(slow / 3, rel=0.01)
    routing.down(2)
    assert prefill_ms(routing, 0) == pytest.approx(slow * told / 3, rel=0.01)
