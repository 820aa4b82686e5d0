"""Which prompts go to a prefill worker."""

import pytest

from headrace.core.base.types import NS_PER_MS, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.router.events import Dispatch, RouteArrive
from headrace.core.router.handoffs import as_prompt, is_worth_it
from support.routing import Routing, names, stored

PROMPT = names("prompt", 64)


def split(*roles: Role) -> Routing:
    routing = Routing()
    for worker_id, role in enumerate(roles):
        routing.up(worker_id, role=role)
    return routing


def goes_there(
    routing: Routing, handoff: str, *, max_tokens: int, neighbour_weight: float = 0.1
) -> bool:
    request = routing.request(PROMPT, max_tokens=max_tokens, neighbour_weight=neighbour_weight)
    config = ClusterConfig(handoff=handoff)
    return is_worth_it(routing.now, request, routing.core, config)


@pytest.mark.parametrize("handoff", ["auto", "always"])
def test_what_ends_with_its_first_token_needs_nobody_who_decodes(handoff: str) -> None:
    routing = split(Role.PREFILL, Role.DECODE)
    assert goes_there(routing, handoff, max_tokens=1)
    routing.down(1)
    assert goes_there(routing, handoff, max_tokens=1)
    assert not goes_there(routing, handoff, max_tokens=2)


def test_unless_it_would_end_sooner_elsewhere() -> None:
    routing = split(Role.PREFILL, Role.DECODE)
    routing.kv(1, *stored(*PROMPT))
    assert not goes_there(routing, "auto", max_tokens=1)
    assert goes_there(routing, "always", max_tokens=1)
    assert not goes_there(routing, "never", max_tokens=1)
    routing = split(Role.PREFILL, Role.DECODE)
    routing.place(names("other", 64), role=Role.PREFILL)
    assert not goes_there(routing, "auto", max_tokens=1)


def test_a_prompt_with_an_answer_goes_there_where_it_would_disturb_others_here() -> None:
    routing = split(Role.PREFILL, Role.DECODE)
    assert not goes_there(routing, "auto", max_tokens=100)
    for number in range(1, 17):  # whose tokens would come later
        routing.place((), num_tokens=500)
        routing.started(number)
    assert goes_there(routing, "auto", max_tokens=100)


def test_neighbours_tokens_count_for_each_of_them() -> None:
    routing = split(Role.PREFILL, Role.DECODE)
    for number in (1, 2):
        routing.place((), num_tokens=500)
        routing.started(number)
    assert goes_there(routing, "auto", max_tokens=100)
    assert not goes_there(routing, "auto", max_tokens=100, neighbour_weight=0)
    # As long as it does not have to wait longer there than they do here.
    routing.place(names("other", 64), role=Role.PREFILL)
    assert not goes_there(routing, "auto", max_tokens=100)
    assert goes_there(routing, "auto", max_tokens=100, neighbour_weight=2)


def test_neighbours_count_as_well_at_a_worker_of_both_kinds_of_work() -> None:
    """It may be asked for prompts alone, and those who decode there wait all the same."""
    routing = split(Role.PREFILL, Role.MIXED)
    for number in (1, 2):
        routing.place((), num_tokens=500)
        routing.started(number)
    assert goes_there(routing, "auto", max_tokens=100)
    for number in range(3):  # sooner at the other one
        routing.place(names(f"{number}", 64), role=Role.PREFILL, excluded=(WorkerId(1),))
    assert not goes_there(routing, "auto", max_tokens=100)


def test_what_a_prefill_worker_holds_for_others_is_nobodys_neighbour() -> None:
    routing = split(Role.PREFILL, Role.DECODE)
    for _ in range(16):
        prompt = routing.place((), num_tokens=500, role=Role.PREFILL)
        routing.started(prompt.request_id)
        answer = routing.place((), num_tokens=500)
        routing.started(answer.request_id)
    assert goes_there(routing, "auto", max_tokens=100, neighbour_weight=1)


@pytest.mark.parametrize(("weight", "chosen"), [(0.1, 0), (0.0, 1)])
def test_the_prompt_goes_to_whom_it_was_judged_by(weight: float, chosen: int) -> None:
    """Not to a busy worker that takes both kinds of work, because its own queue is shorter."""
    routing = split(Role.PREFILL, Role.MIXED)
    for number in range(1, 17):
        routing.place((), num_tokens=500, excluded=(WorkerId(0),))
        routing.started(number)
    routing.place((), num_tokens=400, role=Role.PREFILL, excluded=(WorkerId(1),))
    request = routing.request(PROMPT, max_tokens=100, neighbour_weight=weight)
    is_there = is_worth_it(routing.now, request, routing.core, ClusterConfig())
    assert is_there is (weight > 0)
    quote = routing.core.quote(routing.now, as_prompt(request))
    assert quote is not None
    (dispatch,) = routing.tell(RouteArrive(as_prompt(request)))
    assert isinstance(dispatch, Dispatch)
    assert dispatch.worker_id == chosen
    assert quote.total_ns == pytest.approx(dispatch.decision.chosen.total_ms * NS_PER_MS)


def test_a_price_with_neighbours_is_the_sum_of_its_terms() -> None:
    routing = split(Role.PREFILL, Role.MIXED, Role.DECODE)
    routing.kv(1, *stored(*PROMPT[:32]))
    for number in range(1, 9):
        routing.place((), num_tokens=500)
        routing.started(number)
    config = routing.core.config
    request = routing.request(PROMPT, max_tokens=100, neighbour_weight=0.5)
    quote = routing.core.quote(routing.now, request)
    assert quote is not None
    (dispatch,) = routing.tell(RouteArrive(request))
    assert isinstance(dispatch, Dispatch)
    for one in dispatch.decision.candidates:
        assert one.neighbours_ms > 0
        weighed_ms = (
            one.queue_ms
            + config.prefill_weight * one.prefill_ms
            + one.transfer_ms
            + config.interference_weight * one.interference_ms
        )
        assert one.total_ms == pytest.approx(weighed_ms + one.neighbours_ms)
    assert quote.total_ns == pytest.approx(dispatch.decision.chosen.total_ms * NS_PER_MS)
