"""Who cannot take a request, and what becomes of it."""

import pytest

from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.router.events import (
    Dispatch,
    Queued,
    RouteArrive,
    RouteFailed,
    RouteReject,
    WorkerDrain,
    WorkersStarting,
    WorkerStats,
)
from support.routing import Routing, load, names, spec, stored


def reasons(dispatch: Dispatch) -> dict[str, tuple[str, ...]]:
    return {one.reason: one.workers for one in dispatch.decision.filtered}


def test_filters_are_named_in_the_decision() -> None:
    routing = Routing(1)
    routing.up(1, adapters=("a",), role=Role.PREFILL)
    routing.up(2, adapters=("a",), spec=spec(model_digest="other"))
    routing.up(3, adapters=("a",), spec=spec(max_model_len=64))
    routing.up(4, adapters=("a",), spec=spec(num_blocks=4))
    routing.up(5, adapters=("a",))
    routing.up(6, adapters=("a",))
    routing.up(7, adapters=("a",))
    routing.tell(WorkerDrain(WorkerId(5)))
    dispatch = routing.place(num_tokens=100, adapter="a", model_digest="m", excluded=(WorkerId(6),))
    assert dispatch.worker_id == 7
    assert reasons(dispatch) == {
        "adapter not loaded": ("w0",),
        "other role": ("w1",),
        "other model": ("w2",),
        "context or kv pool too small": ("w3", "w4"),
        "draining": ("w5",),
        "died on it, or stopped": ("w6",),
    }


@pytest.mark.parametrize(
    ("role", "takers"),
    [(Role.MIXED, {0, 2}), (Role.PREFILL, {0, 1}), (Role.DECODE, {0, 2})],
)
def test_each_role_takes_its_work(role: Role, takers: set[int]) -> None:
    routing = Routing(policy="round_robin")
    for worker_id, own in enumerate((Role.MIXED, Role.PREFILL, Role.DECODE)):
        routing.up(worker_id, role=own)
    assert {routing.place(role=role).worker_id for _ in range(6)} == takers


@pytest.mark.parametrize(
    ("fields", "code", "status"),
    [
        ({"num_tokens": 5000}, "context_length_exceeded", 400),
        ({"num_tokens": 1000, "max_tokens": 200}, "kv_pool_too_small", 400),
        ({"adapter": "x"}, "adapter_not_found", 404),
        ({"model_digest": "x"}, "model_not_found", 404),
    ],
)
def test_what_no_worker_could_ever_take_is_refused_at_once(
    fields: dict[str, object], code: str, status: int
) -> None:
    routing = Routing()
    small = spec(num_blocks=64) if code == "kv_pool_too_small" else spec()
    routing.up(0, spec=small, role=Role.DECODE)
    reject = routing.arrive(**fields)  # type: ignore[arg-type]
    assert isinstance(reject, RouteReject)
    assert (reject.code, reject.status_hint) == (code, status)


def test_a_role_that_nobody_has_is_waited_for() -> None:
    routing = Routing(worker_wait_s=10)
    routing.up(0, role=Role.PREFILL)
    assert routing.arrive() == Queued(1, "nobody is there who could take it")
    (effect,) = routing.up(1, role=Role.DECODE)
    assert isinstance(effect, Dispatch)
    assert isinstance(routing.arrive(num_tokens=5000), RouteReject)
    routing.down(1)
    assert isinstance(routing.arrive(), Queued)
    (reject,) = routing.ring(until_ms=11_000)
    assert isinstance(reject, RouteReject)
    assert (reject.code, reject.status_hint) == ("no_worker", 503)


def test_without_workers_a_request_waits_for_one() -> None:
    routing = Routing(worker_wait_s=10)
    assert isinstance(routing.arrive(), Queued)
    (effect,) = routing.up(0)
    assert isinstance(effect, Dispatch)
    assert routing.ring(until_ms=20_000) == []


def test_and_is_refused_when_the_one_that_comes_can_never_take_it() -> None:
    routing = Routing()
    assert isinstance(routing.arrive(num_tokens=1000), Queued)
    (reject,) = routing.up(0, spec=spec(max_model_len=512))
    assert isinstance(reject, RouteReject)
    assert reject.code == "context_length_exceeded"
    assert routing.core.stats().num_waiting == 0


def test_and_is_refused_when_none_comes() -> None:
    routing = Routing(worker_wait_s=10)
    routing.arrive()
    assert routing.ring(until_ms=9_999) == []
    (reject,) = routing.ring(until_ms=10_000)
    assert isinstance(reject, RouteReject)
    assert (reject.code, reject.status_hint) == ("no_worker", 503)
    assert reject.retry_after_s
    routing.up(0)
    routing.place()


def test_a_request_whose_last_worker_goes_while_it_waits_is_refused_in_time() -> None:
    routing = Routing(1, worker_wait_s=10, worker_queue_ms=0)
    routing.place(num_tokens=512)
    assert isinstance(routing.arrive(num_tokens=512), Queued)
    routing.down(0)
    assert [effect.request_id for effect in routing.ring(until_ms=10_000)] == [2]  # type: ignore[union-attr]


def test_a_drained_worker_keeps_what_it_has() -> None:
    routing = Routing(2, policy="round_robin")
    routing.place()
    routing.tell(WorkerDrain(WorkerId(0)))
    assert {routing.place().worker_id for _ in range(3)} == {1}
    assert routing.core.stats().num_in_flight == 4
    routing.serve(1)
    routing.down(0, is_failure=False)
    assert routing.core.stats().num_open_breakers == 0


def test_a_time_that_is_over_is_said_at_once_and_in_the_queue() -> None:
    routing = Routing(1, worker_queue_ms=0)
    late = routing.arrive(deadline_ns=Ns(0))
    assert isinstance(late, RouteReject)
    assert late.code == "deadline_exceeded"
    routing.place(num_tokens=512)
    waiting = routing.arrive(deadline_ns=Ns(100 * NS_PER_MS))
    assert isinstance(waiting, Queued)
    (reject,) = routing.ring(until_ms=100)
    assert isinstance(reject, RouteReject)
    assert (reject.code, reject.status_hint) == ("deadline_exceeded", 504)


def test_late_requests_are_refused_with_the_prediction() -> None:
    routing = Routing(2, refuse_late=True)
    for _ in range(4):
        routing.place(num_tokens=2000)
    reject = routing.arrive(num_tokens=2000, slo=Slo(ttft_ms=500.0))
    assert isinstance(reject, RouteReject)
    assert (reject.code, reject.status_hint) == ("ttft_unattainable", 503)
    assert "the limit is 500 ms" in reject.message
    hasty = routing.arrive(num_tokens=2000, slo=Slo(ttft_ms=0.4))
    assert isinstance(hasty, RouteReject)
    assert "the limit is 0.4 ms" in hasty.message
    assert reject.retry_after_s is not None
    assert reject.retry_after_s > 0.5
    assert isinstance(routing.arrive(num_tokens=2000, slo=Slo(ttft_ms=1e6)), Dispatch)
    migrated = routing.arrive(num_tokens=2000, slo=Slo(ttft_ms=500.0), is_migration=True)
    assert isinstance(migrated, Dispatch)


def test_what_waits_in_the_router_makes_a_request_late_too() -> None:
    """The worker alone would be in time."""
    routing = Routing(1, worker_queue_ms=0, refuse_late=True)
    routing.place(num_tokens=2000)
    in_time = routing.arrive(slo=Slo(ttft_ms=2000.0))
    assert isinstance(in_time, Queued)
    for _ in range(3):
        assert isinstance(routing.arrive(num_tokens=2000), Queued)
    late = routing.arrive(slo=Slo(ttft_ms=2000.0))
    assert isinstance(late, RouteReject)
    assert late.code == "ttft_unattainable"


def test_a_crowd_is_refused_with_a_time_to_come_back() -> None:
    routing = Routing(1, worker_queue_ms=0, max_waiting_requests=2)
    routing.place(num_tokens=2000)
    assert isinstance(routing.arrive(), Queued)
    assert isinstance(routing.arrive(), Queued)
    reject = routing.arrive()
    assert isinstance(reject, RouteReject)
    assert (reject.code, reject.status_hint) == ("queue_full", 429)
    assert (reject.retry_after_s or 0) >= 1


# ---- silence and failures


def test_a_silent_worker_is_taken_for_busy_not_for_idle() -> None:
    routing = Routing(2, stats_stale_ms=1000)
    routing.stats(0, num_running=0)
    routing.stats(1, num_running=2, num_queued_prefill_tokens=4096)
    assert routing.place().worker_id == 0
    routing.now = Ns(routing.now + 900 * NS_PER_MS)
    routing.stats(1, num_running=2, num_queued_prefill_tokens=4096)
    routing.now = Ns(routing.now + 200 * NS_PER_MS)
    dispatch = routing.place()
    assert dispatch.worker_id == 1
    assert reasons(dispatch) == {"silent about its load": ("w0",)}


def test_nobody_waits_for_a_worker_that_fell_silent() -> None:
    """F14: cut off by the network while it is busy, with a prefix that is worth waiting for."""
    routing = Routing(2, stats_stale_ms=1000, worker_queue_ms=100)
    chain = names("long", 200)
    routing.kv(0, *stored(*chain))
    routing.stats(1)
    routing.stats(0, num_running=1, num_queued_prefill_tokens=4000)
    assert isinstance(routing.arrive(chain), Queued)
    routing.now = Ns(routing.now + 1500 * NS_PER_MS)
    (effect,) = routing.tell(WorkerStats(WorkerId(1), load()))
    assert isinstance(effect, Dispatch)
    assert effect.worker_id == 1


def test_when_all_are_silent_and_full_requests_wait() -> None:
    routing = Routing()
    routing.up(0, max_running_seqs=1)
    routing.stats(0)
    routing.place()
    routing.now = Ns(routing.now + 5000 * NS_PER_MS)
    assert routing.arrive() == Queued(2, "no room")
    (effect,) = routing.done(1)
    assert isinstance(effect, Dispatch)
    assert effect.decision.is_fallback


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1.0, 1e308])
def test_nonsense_is_silence(figure: float) -> None:
    routing = Routing(2, stats_stale_ms=1000)
    for worker_id in (0, 1):
        routing.stats(worker_id)
    routing.now = Ns(routing.now + 900 * NS_PER_MS)
    routing.stats(0, num_running=figure, num_waiting=figure)
    routing.stats(1)
    routing.now = Ns(routing.now + 200 * NS_PER_MS)
    assert {routing.place().worker_id for _ in range(3)} == {1}


def test_so_it_is_where_nothing_else_was_ever_told() -> None:
    """Of one that has told nothing, the router's bookings are all that there is to go by."""
    routing = Routing(2, stats_stale_ms=1000)
    for _ in range(15):
        routing.stats(0, num_running=float("nan"))
        routing.now = Ns(routing.now + 100 * NS_PER_MS)
    dispatches = [routing.place() for _ in range(3)]
    assert {one.worker_id for one in dispatches} == {1}
    assert dispatches[0].decision.filtered[0].reason == "silent about its load"
    routing.stats(0)
    assert 0 in {routing.place().worker_id for _ in range(3)}


def test_when_all_are_silent_doubts_do_not_count() -> None:
    routing = Routing(2, stats_stale_ms=1000)
    for worker_id in (0, 1):
        routing.stats(worker_id)
    routing.now = Ns(routing.now + 5000 * NS_PER_MS)
    assert routing.place().decision.is_fallback


def test_a_flapping_worker_is_cut_off_and_comes_back_by_probes() -> None:
    """F10: dies every two seconds under the same name."""
    routing = Routing(1, breaker_open_s=5, breaker_probes=2)
    for flap in range(3):
        routing.up(10 + flap, name="flapping")
        routing.now = Ns(routing.now + 2000 * NS_PER_MS)
        routing.down(10 + flap)
    routing.up(20, name="flapping")
    for _ in range(20):
        dispatch = routing.place()
        assert dispatch.worker_id == 0
        assert reasons(dispatch) == {"cut off after failures": ("flapping",)}
    routing.ring(until_ms=routing.now / NS_PER_MS + 5000)
    homes = [routing.place() for _ in range(5)]
    assert [home.worker_id for home in homes].count(WorkerId(20)) == 1  # one probe at a time
    probe = next(home for home in homes if home.worker_id == 20)
    routing.serve(probe.request_id)
    probe = routing.place()
    assert probe.worker_id == 20
    routing.serve(probe.request_id)
    assert routing.core.stats().num_open_breakers == 0
    assert {routing.place().worker_id for _ in range(3)} == {20}


def test_a_failed_probe_cuts_it_off_again() -> None:
    routing = Routing(2, policy="round_robin", breaker_failures=1, breaker_open_s=5)
    routing.place()
    routing.tell(RouteFailed(1, "device lost"))
    assert {routing.place().worker_id for _ in range(3)} == {1}
    routing.ring(until_ms=5_000)
    probe = next(d for d in (routing.place(), routing.place()) if d.worker_id == 0)
    routing.tell(RouteFailed(probe.request_id))
    routing.ring(until_ms=14_000)
    assert {routing.place().worker_id for _ in range(3)} == {1}
    routing.ring(until_ms=15_000)
    assert 0 in {routing.place().worker_id for _ in range(3)}


def test_a_probe_that_was_cancelled_makes_room_for_another() -> None:
    routing = Routing(2, policy="round_robin", breaker_failures=1, breaker_open_s=5)
    routing.place()
    routing.tell(RouteFailed(1))
    routing.ring(until_ms=5_000)
    probe = next(d for d in (routing.place(), routing.place()) if d.worker_id == 0)
    routing.done(probe.request_id)
    assert routing.core.stats().num_open_breakers == 1
    assert 0 in {routing.place().worker_id for _ in range(2)}


def test_when_all_are_cut_off_requests_still_go_somewhere() -> None:
    routing = Routing(1, breaker_failures=1)
    routing.place()
    routing.tell(RouteFailed(1))
    assert routing.place().decision.is_fallback


def test_a_request_goes_again_after_its_worker_died_and_counts_once() -> None:
    routing = Routing(2)
    request = routing.request(names("a", 8))
    (first,) = routing.tell(RouteArrive(request))
    assert isinstance(first, Dispatch)
    routing.down(first.worker_id)
    assert routing.core.stats().num_in_flight == 0
    again = routing.request(
        request.block_names,
        request_id=request.request_id,
        excluded=(first.worker_id,),
        is_migration=True,
    )
    (second,) = routing.tell(RouteArrive(again))
    assert isinstance(second, Dispatch)
    assert second.worker_id != first.worker_id
    # The same once more, without news of a death: the booking moves.
    routing.up(5)
    routing.tell(RouteArrive(again))
    assert routing.core.stats().num_in_flight == 1


def test_work_waits_for_the_role_that_is_away() -> None:
    routing = Routing()
    routing.up(0, role=Role.PREFILL)
    assert isinstance(routing.arrive(role=Role.MIXED), Queued)


def test_nobody_is_refused_for_want_of_a_worker_while_one_is_starting() -> None:
    routing = Routing(worker_wait_s=10)
    routing.tell(WorkersStarting(1))
    routing.arrive()
    assert routing.ring(until_ms=60_000) == []
    routing.tell(WorkersStarting(0))
    assert [effect.request_id for effect in routing.ring(until_ms=62_000)] == [1]  # type: ignore[union-attr]
