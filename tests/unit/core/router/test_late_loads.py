"""Loads that the router takes when something depends on them: it decides as if it had been told."""

from collections.abc import Iterator
from random import Random

import pytest

from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.events import (
    Dispatch,
    RouteDone,
    RouteProgress,
    RouterEvent,
    RouteStarted,
    WorkerLoad,
    WorkerStats,
)
from support.routing import Routing, load


class Late:
    """The last word of each worker that was not taken."""

    def __init__(self) -> None:
        self.told: dict[WorkerId, tuple[Ns, WorkerStats]] = {}
        self.num_taken = 0

    def take(self, worker_id: WorkerId) -> tuple[Ns, WorkerStats] | None:
        self.num_taken += worker_id in self.told
        return self.told.pop(worker_id, None)

    def take_all(self) -> Iterator[tuple[Ns, WorkerStats]]:
        for worker_id in list(self.told):
            if (late := self.take(worker_id)) is not None:
                yield late


@pytest.mark.parametrize("seed", range(20))
def test_choices_are_the_same_whether_loads_are_told_or_taken(seed: int) -> None:
    rng, late = Random(seed), Late()
    told, taking = Routing(), Routing()
    taking.core = RouterCore(RouterConfig(), loads=late)
    both = (told, taking)
    for routing in both:
        for worker_id in range(3):
            routing.up(worker_id)
    running: dict[int, int] = {}
    num_sent, num_told = [0, 0, 0], 0
    for number in range(200):
        pause_ms, draw = rng.random() * 50, rng.random()
        for routing in both:
            routing.now = Ns(routing.now + round(pause_ms * NS_PER_MS))
        if draw < 0.6:
            worker_id = WorkerId(rng.randrange(3))
            stats = WorkerStats(worker_id, some_load(rng), rng.randrange(num_sent[worker_id] + 1))
            told.tell(stats)
            late.told[worker_id] = taking.now, stats
            num_told += 1
        elif draw < 0.8 or not running:
            first, other = (routing.arrive(num_tokens=500) for routing in both)
            assert first == other
            assert isinstance(first, Dispatch)
            running[first.request_id] = 0
            num_sent[first.worker_id] += 1
        else:
            event = next_of(rng, running)
            for routing in both:
                routing.tell(event)
        if number % 5 == 0:
            due_ns = [routing.core.due_ns(routing.now, WorkerId(number % 3)) for routing in both]
            assert due_ns[0] == due_ns[1]
    assert 0 < late.num_taken < num_told


def some_load(rng: Random) -> WorkerLoad:
    return load(
        num_running=rng.randrange(4),
        num_queued_prefill_tokens=rng.randrange(2000),
        num_kv_tokens=rng.randrange(3000),
        num_free_blocks=900,
    )


def next_of(rng: Random, running: dict[int, int]) -> RouterEvent:
    """What the router hears next of one of the requests."""
    request_id = rng.choice(list(running))
    running[request_id] += 1
    if running[request_id] == 1:
        return RouteStarted(request_id)
    if running[request_id] == 2:
        return RouteProgress(request_id, 256)
    del running[request_id]
    return RouteDone(request_id)


def test_no_room_is_known_by_what_a_worker_has_said_last() -> None:
    late, made = Late(), Routing()
    made.core = RouterCore(RouterConfig(), loads=late)
    made.up(0)
    made.up(1)
    late.told[WorkerId(0)] = made.now, WorkerStats(WorkerId(0), load(num_running=10_000), 0)
    found = made.arrive(num_tokens=100)
    assert isinstance(found, Dispatch)
    assert found.worker_id == WorkerId(1)
