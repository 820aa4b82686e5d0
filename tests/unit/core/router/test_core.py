"""RouterCore: requests have one place, decisions say why, queues move."""

import msgspec
import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.decision import Decision
from headrace.core.router.events import (
    Dispatch,
    Queued,
    Resync,
    RouteArrive,
    RouteDone,
    RouteProgress,
    WorkerDown,
    WorkerKv,
    WorkerKvSnapshot,
)
from headrace.core.router.waiting import OVERTAKE_NS
from support.routing import Routing, names, removed, stored

CHAIN = names("a", 32)


def test_a_decision_adds_up_and_survives_the_wire() -> None:
    routing = Routing(6)
    routing.kv(3, *stored(*CHAIN))
    routing.stats(3, num_running=1, num_queued_prefill_tokens=100, num_kv_tokens=500)
    decision = routing.place(CHAIN).decision
    chosen = decision.chosen
    assert decision.worker_id == chosen.worker_id == 3
    assert chosen.queue_ms > 0
    assert chosen.interference_ms > 0
    assert chosen.ttft_ms == chosen.queue_ms + chosen.prefill_ms + chosen.transfer_ms
    assert chosen.total_ms == pytest.approx(
        chosen.queue_ms + 2 * chosen.prefill_ms + chosen.transfer_ms + chosen.interference_ms
    )
    assert chosen.stats_age_ms == 0
    assert decision.candidates[1].stats_age_ms is None
    assert (decision.num_candidates, len(decision.candidates)) == (6, 3)
    assert decision.regret_ms == 0
    (alternative,) = decision.alternatives
    assert (alternative.by, alternative.worker_id != 3) == ("no_cache", True)
    assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision


def test_workers_are_known_by_their_names_whatever_life_they_are_in() -> None:
    """Of three that were lost and came again the numbers are not those that their names say."""
    routing = Routing(policy="round_robin", kv_link="memory")
    for worker_id, name in ((3, "w2"), (4, "w1"), (5, "w0")):
        routing.up(worker_id, name=name, kv_block_bytes=1 << 10)
    routing.kv(4, *stored(*CHAIN))
    decision = routing.place(CHAIN, excluded=(WorkerId(5),)).decision
    assert (decision.worker, decision.worker_id) == ("w2", 3)
    assert (decision.chosen.fetch_from, decision.chosen.fetch_from_id) == ("w1", 4)
    assert [(one.worker, one.worker_id) for one in decision.alternatives] == [("w1", 4), ("w2", 3)]
    assert [one.workers for one in decision.filtered] == [("w0",)]


def test_another_policy_is_compared_with_kv() -> None:
    routing = Routing(2, policy="round_robin")
    routing.kv(1, *stored(*CHAIN))
    decision = routing.place(CHAIN).decision
    assert decision.worker_id == 0
    assert decision.regret_ms > 0
    assert {one.by: one.worker_id for one in decision.alternatives}["kv"] == 1


def test_ties_are_counted() -> None:
    assert Routing(5).place(CHAIN).decision.num_tied == 5


def test_the_first_token_is_told_to_the_decision() -> None:
    routing = Routing(1)
    routing.place(CHAIN)
    assert routing.core.decision(1).ttft_ms is None  # type: ignore[union-attr]
    routing.started(1, after_ms=25.0)
    routing.started(1, after_ms=25.0)
    assert routing.core.decision(1).ttft_ms == 25.0  # type: ignore[union-attr]


def test_a_second_decision_has_the_first_one_beside_it_and_no_more() -> None:
    routing = Routing(3)
    places = [
        routing.place(CHAIN, request_id=1, excluded=tuple(map(WorkerId, range(num)))).worker_id
        for num in range(3)
    ]
    last = routing.core.decision(1)
    assert last is not None
    assert last.before is not None
    assert [last.before.worker_id, last.worker_id] == places[1:]
    assert last.before.before is None


def test_old_decisions_are_forgotten() -> None:
    routing = Routing(1, kept_decisions=2)
    for _ in range(3):
        routing.place()
    assert [routing.core.decision(i) is not None for i in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize("policy", ["kv", "least_loaded", "session", "prefix"])
def test_when_all_is_done_nothing_is_booked(policy: str) -> None:
    routing = Routing(3, policy=policy)
    for _ in range(9):
        routing.place(CHAIN, num_choices=2)
    for request_id in range(1, 10):
        routing.started(request_id)
        routing.tell(RouteProgress(request_id, 7))
        routing.done(request_id)
        routing.done(request_id)
    stats = routing.core.stats()
    assert (stats.num_in_flight, stats.num_waiting, stats.num_dispatched) == (0, 0, 9)
    assert routing.place(num_tokens=10).decision.chosen.queue_ms == 0


def test_a_request_waits_for_room_and_gets_it() -> None:
    routing = Routing(1, worker_queue_ms=100)
    routing.place(num_tokens=2000)
    second = routing.arrive(num_tokens=2000)
    assert second == Queued(2, "no room")
    (effect,) = routing.started(1, after_ms=800)
    assert isinstance(effect, Dispatch)
    assert (effect.request_id, effect.decision.waited_ms) == (2, 800)


def test_sequences_and_blocks_are_room_too() -> None:
    routing = Routing()
    routing.up(0, max_running_seqs=2)
    routing.place(num_choices=2)
    assert isinstance(routing.arrive(), Queued)
    assert isinstance(routing.done(1)[0], Dispatch)
    routing = Routing(1, worker_queue_ms=1e9)
    for _ in range(4):  # of 1,024 blocks, each takes 227
        routing.place(num_tokens=3500)
    assert isinstance(routing.arrive(num_tokens=3500), Queued)
    assert isinstance(routing.done(1)[0], Dispatch)


def test_who_waits_is_not_overtaken_by_who_comes() -> None:
    routing = Routing(1, policy="least_loaded", worker_queue_ms=0)
    routing.place(num_tokens=512)
    assert isinstance(routing.arrive(num_tokens=512), Queued)
    assert isinstance(routing.arrive(num_tokens=16), Queued)
    assert [one.request_id for one in routing.started(1)] == [2]  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["kv", "least_loaded"])
def test_who_fits_nowhere_is_overtaken_for_a_while(policy: str) -> None:
    """Whether it waits for any worker, or for one."""
    routing = Routing(1, policy=policy, worker_queue_ms=1e9)
    for _ in range(4):  # 116 of 1,024 blocks are left
        routing.place(num_tokens=3500)

    def gets_a_worker() -> bool:
        effects = routing.tell(RouteArrive(routing.request(num_tokens=16, tenant="small")))
        return any(isinstance(effect, Dispatch) for effect in effects)

    assert isinstance(routing.arrive(num_tokens=3500, tenant="large"), Queued)
    large = routing.num_requests
    assert gets_a_worker()
    routing.ring(until_ms=OVERTAKE_NS / NS_PER_MS + 1)
    assert not gets_a_worker()
    effects = routing.done(1)
    assert [one.request_id for one in effects if isinstance(one, Dispatch)] == [
        large,
        routing.num_requests,
    ]


def test_a_request_is_held_for_its_prefix_while_others_have_room() -> None:
    routing = Routing(2, worker_queue_ms=10)
    chain = names("long", 200)
    routing.kv(0, *stored(*chain))
    routing.place(chain + names("own", 8))
    held = routing.arrive(chain + names("other", 8))
    assert held == Queued(2, "no room")
    assert routing.place(names("free", 8)).worker_id == 1
    (effect,) = routing.started(1)
    assert isinstance(effect, Dispatch)
    assert (effect.request_id, effect.worker_id) == (2, 0)


def test_a_worker_that_comes_takes_what_was_held_for_another() -> None:
    routing = Routing(1, worker_queue_ms=10)
    routing.place(num_tokens=3900)
    for _ in range(3):
        assert isinstance(routing.arrive(num_tokens=400), Queued)
    effects = routing.up(1)
    assert [one.worker_id for one in effects if isinstance(one, Dispatch)] == [1]


def test_cancelled_while_waiting() -> None:
    routing = Routing(1, worker_queue_ms=0)
    routing.place(num_tokens=512)
    routing.arrive()
    routing.done(2)
    assert routing.started(1) == []
    assert routing.core.stats().num_waiting == 0


# ---- events of caches


def test_lost_events_are_noticed_and_a_snapshot_mends_them() -> None:
    routing = Routing(2)
    worker = WorkerId(0)
    routing.kv(0, *stored(*CHAIN[:4]))
    assert routing.tell(WorkerKv(worker, 6, stored(*CHAIN[6:8]))) == [Resync(worker)]
    assert routing.core.stats().num_unsynced_workers == 1
    assert routing.tell(WorkerKvSnapshot(worker, 8, CHAIN[:8])) == []
    assert routing.core.stats().num_unsynced_workers == 0
    assert routing.place(CHAIN[:8]).decision.chosen.num_hit_blocks == 8
    assert routing.tell(WorkerKv(worker, 8, removed(*CHAIN[4:8]))) == []
    routing.serve(1)
    assert routing.place(CHAIN[:8]).decision.chosen.num_hit_blocks == 4


def test_a_snapshot_keeps_what_is_on_its_way() -> None:
    routing = Routing(3)
    home = routing.place(CHAIN).worker_id
    routing.tell(WorkerKvSnapshot(home, 5, ()))
    assert routing.place(CHAIN).worker_id == home


def test_events_of_nobody_are_nothing() -> None:
    routing = Routing(1)
    routing.down(0)
    assert routing.kv(0, *stored(*CHAIN)) == []
    routing.stats(0)
    assert routing.tell(WorkerDown(WorkerId(9), "")) == []
    assert routing.done(99) == []
    assert routing.started(99) == []
    assert routing.tell(RouteProgress(99, 3)) == []


def test_a_dead_workers_cache_is_gone_at_once() -> None:
    routing = Routing(2)
    routing.kv(0, *stored(*CHAIN))
    routing.down(0)
    assert routing.place(CHAIN).decision.chosen.num_hit_blocks == 0
    routing.up(7, name="w0")
    routing.serve(1)
    assert routing.place(names("b", 32) + CHAIN).decision.chosen.num_hit_blocks == 0


def test_our_own_bugs_are_loud() -> None:
    core = RouterCore(RouterConfig())
    core.handle(Ns(5), RouteDone(1))
    with pytest.raises(InvariantError, match="time went back"):
        core.handle(Ns(4), RouteDone(1))
    routing = Routing(1)
    with pytest.raises(InvariantError, match="used twice"):
        routing.up(0)
    routing.place()
    routing.core._bookings.clear()
    with pytest.raises(InvariantError, match="booking lost"):
        routing.core.check()
