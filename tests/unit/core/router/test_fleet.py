"""Workers of one machine are as fast as each other, whatever each has measured at its start."""

import pytest

from headrace.core.base.worker import Role
from headrace.core.cost.fitted import FittedCostModel
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
        routing.core.quote_ns(routing.now, routing.request(names("a", 64), role=role))
        for role in (Role.PREFILL, Role.MIXED)
    )
    assert there == here


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
