"""What KV takes on its way: through memory on one machine, over the network between machines."""

import pytest

from headrace.core.base.types import NS_PER_MS
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.router.decision import Candidate
from headrace.core.router.events import Dispatch, RouteArrive
from headrace.core.router.handoffs import as_coming, as_prompt, is_worth_it
from headrace.core.router.pricing import AUTO_LINK
from support.routing import Routing, names, stored

PROMPT = names("p", 128)
MIB = 1 << 20
COST = FittedCostModel.prior()


def candidates(routing: Routing) -> dict[str, Candidate]:
    (dispatch,) = routing.tell(RouteArrive(routing.request(PROMPT)))
    assert isinstance(dispatch, Dispatch)
    return {one.name: one for one in dispatch.decision.candidates}


@pytest.mark.parametrize(
    ("gb_s", "network_ms"),
    [(0.0, COST.copy_ns(128 * MIB, "tcp") / NS_PER_MS), (0.125, 128 * MIB / 0.125 / NS_PER_MS)],
)
def test_a_prefix_comes_by_the_way_that_there_is(gb_s: float, network_ms: float) -> None:
    routing = Routing(kv_link=AUTO_LINK, kv_network_gb_s=gb_s)
    for worker_id, machine in enumerate(["one", "one", "other"]):
        routing.up(worker_id, machine=machine, kv_block_bytes=MIB, cost=COST.slower(100.0))
    routing.kv(0, *stored(*PROMPT))
    found = candidates(routing)
    memory_ms = COST.copy_ns(128 * MIB, "memory") / NS_PER_MS
    assert found["w0"].num_fetched_blocks == 0
    assert found["w1"].transfer_ms == pytest.approx(memory_ms)
    assert found["w2"].transfer_ms == pytest.approx(network_ms)
    assert {found["w1"].fetch_from, found["w2"].fetch_from} == {"w0"}


def test_what_takes_longer_over_the_network_than_to_compute_is_computed() -> None:
    routing = Routing(kv_link=AUTO_LINK, kv_network_gb_s=0.01)
    for worker_id, machine in enumerate(["one", "one", "other"]):
        routing.up(worker_id, machine=machine, kv_block_bytes=MIB)
    routing.kv(0, *stored(*PROMPT))
    found = candidates(routing)
    assert found["w1"].num_fetched_blocks == 128
    assert found["w2"].num_fetched_blocks == 0


def busy(machine: str, block_bytes: int, gb_s: float = 0.0) -> Routing:
    """A prefill worker, and one that decodes and has enough to do, perhaps elsewhere."""
    routing = Routing(kv_link=AUTO_LINK, kv_network_gb_s=gb_s)
    routing.up(0, role=Role.PREFILL, machine="one", kv_block_bytes=block_bytes)
    routing.up(1, role=Role.DECODE, machine=machine, kv_block_bytes=block_bytes)
    for number in range(1, 9):
        routing.place((), num_tokens=500)
        routing.started(number)
    return routing


@pytest.mark.parametrize(
    ("machine", "block_bytes", "gb_s", "is_worth"),
    [
        ("one", MIB, 0.0, True),
        ("other", MIB, 0.0, True),
        ("other", MIB, 0.01, False),
        ("one", MIB, 0.01, True),
        ("one", 1 << 28, 0.0, False),
        ("other", 1000, 0.01, True),
    ],
)
def test_a_hand_off_has_its_way_to_pay(
    machine: str, block_bytes: int, gb_s: float, is_worth: bool
) -> None:
    routing = busy(machine, block_bytes, gb_s)
    request = routing.request(PROMPT, max_tokens=100, neighbour_weight=0.1)
    assert is_worth_it(routing.now, request, routing.core, ClusterConfig()) is is_worth


@pytest.mark.parametrize(("machine", "link"), [("one", "memory"), ("other", "tcp")])
def test_what_is_coming_comes_from_the_worker_that_computes_it(machine: str, link: str) -> None:
    routing = busy(machine, MIB)
    request = routing.request(PROMPT, max_tokens=100)
    routing.tell(RouteArrive(as_prompt(request)))
    (dispatch,) = routing.tell(RouteArrive(as_coming(request, -1)))
    assert isinstance(dispatch, Dispatch)
    expected_ms = COST.copy_ns(128 * MIB, link) / NS_PER_MS
    assert dispatch.decision.chosen.transfer_ms == pytest.approx(expected_ms)
