"""Whose turn is next."""

import sys
from types import FrameType
from typing import Any

import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.request import AGING_NS, Slo
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, WorkerId
from headrace.core.router.events import RouteRequest
from headrace.core.router.waiting import MAX_ABSENT, MAX_HEADS, WaitingRoom

ANY = WorkerId(0)


class Room:
    """A waiting room whose requests are short to write."""

    def __init__(self) -> None:
        self.room = WaitingRoom()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.room, name)

    def put(self, request_id: int, now: int = 0, **fields: object) -> None:
        request = RouteRequest(
            request_id=request_id,
            block_names=(),
            num_tokens=16,
            arrived_ns=Ns(now),
            **fields,  # type: ignore[arg-type]
        )
        self.room.add(Ns(now), request, 1000)

    def order(self, now: int = 0) -> list[int]:
        """Let all leave in their turns."""
        found: list[int] = []
        while len(self.room):
            head = self.room.heads(Ns(now), ANY)[0]
            found.append(head.request.request_id)
            self.room.charge(head.request.tenant, 100)
            self.room.remove(head.request.request_id)
            self.room.check()
        return found


@pytest.fixture
def room() -> Room:
    return Room()


def test_the_first_goes_first(room: Room) -> None:
    for request_id in range(4):
        room.put(request_id)
    assert room.order() == [0, 1, 2, 3]


def test_the_least_slack_goes_first(room: Room) -> None:
    room.put(0)
    room.put(1, slo=Slo(ttft_ms=2000.0))
    room.put(2, slo=Slo(ttft_ms=500.0))
    assert room.order() == [2, 1, 0]


def test_who_takes_longer_to_compute_has_less_slack() -> None:
    room = WaitingRoom()
    for request_id, (ttft_ms, prefill_ms) in enumerate([(900.0, 10), (1000.0, 800)]):
        request = RouteRequest(
            request_id=request_id, block_names=(), num_tokens=16, slo=Slo(ttft_ms=ttft_ms)
        )
        room.add(Ns(0), request, prefill_ms * NS_PER_MS)
    assert room.heads(Ns(0), ANY)[0].request.request_id == 1


def test_who_is_late_makes_nobody_else_late(room: Room) -> None:
    room.put(0, slo=Slo(ttft_ms=100.0))
    room.put(1, slo=Slo(ttft_ms=2000.0))
    assert room.order(now=200 * NS_PER_MS) == [1, 0]


def test_priorities_go_first_until_others_have_waited(room: Room) -> None:
    room.put(0, priority=1)
    room.put(1, priority=0)
    assert room.order() == [1, 0]
    room.put(0, priority=1)
    room.put(1, now=2 * AGING_NS, priority=0)
    assert room.order(now=2 * AGING_NS) == [0, 1]


def test_migrated_requests_go_before_all(room: Room) -> None:
    room.put(0, priority=-5)
    room.put(1, priority=7, is_migration=True)
    assert room.order() == [1, 0]


def test_tenants_take_turns_by_what_they_got(room: Room) -> None:
    for request_id in range(6):
        room.put(request_id, tenant="a")
    room.put(10, tenant="b")
    room.put(11, tenant="b")
    assert room.order() == [0, 10, 1, 11, 2, 3, 4, 5]


def test_idleness_is_no_credit(room: Room) -> None:
    for request_id in range(4):
        room.put(request_id, tenant="a")
    room.charge("a", 10_000)
    for request_id in range(10, 14):
        room.put(request_id, tenant="b")
    assert room.order()[:4] == [0, 10, 1, 11]


def test_tenants_that_are_made_up_are_forgotten_and_others_are_not(room: Room) -> None:
    """While somebody waits all the time, and each request has a key of its own."""
    room.put(0, tenant="waits")
    room.charge("waits", 3)
    for number in range(3 * MAX_ABSENT):
        room.charge(f"key {number}", 5)
    assert MAX_ABSENT < len(room.room._service) <= 2 * MAX_ABSENT + 1
    room.put(1, tenant=f"key {3 * MAX_ABSENT - 1}")  # of which it is known what it has had
    room.put(2, tenant="new")  # begins with the least of those who wait
    assert room.order() == [0, 2, 1]
    assert room.room._service == {}


def test_who_is_held_for_another_worker_is_not_asked(room: Room) -> None:
    room.put(0)
    room.put(1)
    zero = room.find(0)
    assert zero is not None
    room.hold(zero, WorkerId(1), 500)
    room.check()
    assert (room.held_ns(WorkerId(1)), room.held_ns(None), room.prefill_ns) == (500, 1000, 1500)
    assert [one.request.request_id for one in room.heads(Ns(0), WorkerId(0))] == [1]
    assert [one.request.request_id for one in room.heads(Ns(0), WorkerId(1))] == [0]
    room.remove(1)
    # Nobody else waits: a worker without work may take over.
    assert [one.request.request_id for one in room.heads(Ns(0), WorkerId(0))] == [0]
    room.let_go(WorkerId(1))
    assert room.held_ns(WorkerId(1)) == 0
    room.check()


def test_no_more_than_a_few_are_asked(room: Room) -> None:
    for request_id in range(50):
        room.put(request_id, tenant=str(request_id))
    assert len(room.heads(Ns(0), ANY)) == MAX_HEADS


def test_leaving_twice_is_leaving_once(room: Room) -> None:
    room.put(0)
    room.remove(0)
    room.remove(0)
    room.check()
    assert room.prefill_ns == 0


def test_sums_that_are_wrong_are_loud(room: Room) -> None:
    room.put(0, now=5 * NS_PER_S)
    waiting = room.find(0)
    assert waiting is not None
    waiting.held_ns += 1
    with pytest.raises(InvariantError, match="miscounted"):
        room.check()


def num_calls_of_a_turn(room: Room) -> int:
    """What is called for it; its time would be a guess."""
    num_calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        room.remove(room.heads(Ns(0), ANY)[0].request.request_id)
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_turn_costs_the_same_however_many_wait() -> None:
    few, many = Room(), Room()
    for request_id in range(10_000):
        many.put(request_id, priority=request_id % 2)
        if request_id < 100:
            few.put(request_id, priority=request_id % 2)
    assert num_calls_of_a_turn(many) == num_calls_of_a_turn(few)


def test_nor_does_it_matter_how_often_they_were_held_elsewhere(room: Room) -> None:
    room.put(0)
    room.put(1)
    one = room.find(0)
    assert one is not None
    for worker in (1, None) * 1000:
        room.hold(one, None if worker is None else WorkerId(worker), 1000)
    room.remove(0)
    assert num_calls_of_a_turn(room) < 200
