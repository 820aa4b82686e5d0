"""Blocks of which the router is told when a choice asks for them."""

from collections.abc import Sequence

from headrace.core.base.types import WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.events import Dispatch, WorkerKv
from support.routing import Routing, names, removed, stored


class Late:
    """What workers have said and nobody has told."""

    def __init__(self) -> None:
        self.events: dict[WorkerId, WorkerKv] = {}
        self.asked: list[list[WorkerId]] = []

    def __call__(self, worker_ids: Sequence[WorkerId]) -> list[WorkerKv]:
        self.asked.append(list(worker_ids))
        return [self.events.pop(one) for one in worker_ids if one in self.events]


def routing(late: Late) -> Routing:
    made = Routing()
    made.core = RouterCore(RouterConfig(), late)
    for worker_id in range(3):
        made.up(worker_id)
    return made


def test_a_choice_knows_what_a_worker_has_stored_behind_a_block_of_the_prompt() -> None:
    late, chain = Late(), names("a", 20)
    made = routing(late)
    made.kv(1, *stored(*chain[:2]))
    late.events[WorkerId(1)] = WorkerKv(WorkerId(1), 2, stored(*chain[2:]))
    first = made.arrive(chain)
    assert isinstance(first, Dispatch)
    assert late.asked == [[WorkerId(1)]]
    assert first.decision.chosen.worker_id == WorkerId(1)
    assert first.decision.chosen.num_hit_blocks == 20


def test_a_choice_knows_what_a_worker_has_evicted_of_the_prompt() -> None:
    late, chain = Late(), names("a", 20)
    made = routing(late)
    made.kv(1, *stored(*chain))
    made.kv(2, *stored(*chain[:4]))
    late.events[WorkerId(1)] = WorkerKv(WorkerId(1), 20, removed(*reversed(chain)))
    first = made.arrive(chain)
    assert isinstance(first, Dispatch)
    assert first.decision.chosen.worker_id == WorkerId(2)
    assert first.decision.chosen.num_hit_blocks == 4


def test_nobody_is_asked_where_nobody_has_the_first_block() -> None:
    late = Late()
    made = routing(late)
    made.kv(1, *stored(*names("b", 3)))
    made.arrive(names("a", 3))
    assert late.asked == []
