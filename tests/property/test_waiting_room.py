"""Whose turn is next, against a look at everybody who waits."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, WorkerId
from headrace.core.router.events import RouteRequest
from headrace.core.router.waiting import MAX_HEADS, Waiting, WaitingRoom

WORKERS = [WorkerId(number) for number in range(3)]


def heads_of_all(room: WaitingRoom, now: Ns, worker_id: WorkerId) -> set[int]:
    mine = [one for one in room if one.held_for in (None, worker_id)]
    first: dict[tuple[int, str], Waiting] = {}
    for one in sorted(mine or room, key=lambda one: one.slack_key(now)):
        first.setdefault((one.priority, one.request.tenant), one)
    return {one.request.request_id for one in first.values()}


def request(rng: Random, request_id: int, now: Ns) -> RouteRequest:
    return RouteRequest(
        request_id=request_id,
        block_names=(),
        num_tokens=16,
        arrived_ns=now,
        priority=rng.randrange(2),
        tenant=rng.choice("ab"),
        slo=Slo(ttft_ms=rng.choice((None, 100.0, 5000.0))),
        is_migration=rng.random() < 0.1,
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_heads_are_those_of_a_look_at_everybody(seed: int) -> None:
    rng, room, now = Random(seed), WaitingRoom(), Ns(0)
    waiting: dict[int, Waiting] = {}
    for request_id in range(rng.randrange(1, 300)):
        now = Ns(now + rng.randrange(rng.choice((NS_PER_MS, NS_PER_S))))
        chance = rng.random()
        if chance < 0.5:
            waiting[request_id] = room.add(now, request(rng, request_id, now), 1000)
        elif waiting and chance < 0.7:
            room.remove(gone := rng.choice(list(waiting)))
            del waiting[gone]
        elif waiting and chance < 0.95:
            place = rng.choice((None, *WORKERS))
            room.hold(rng.choice(list(waiting.values())), place, rng.randrange(1000))
        else:
            room.let_go(rng.choice(WORKERS))
        room.check()
        for worker_id in WORKERS if rng.random() < 0.5 else ():
            heads = [one.request.request_id for one in room.heads(now, worker_id)]
            assert set(heads) == heads_of_all(room, now, worker_id)
            assert len(heads) == len(set(heads)) <= MAX_HEADS
