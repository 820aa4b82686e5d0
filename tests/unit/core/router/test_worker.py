"""The load of a worker: booked by the router, reconciled with the worker's word, never twice."""

import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.breaker import Breaker
from headrace.core.router.events import RouteRequest, WorkerUp
from headrace.core.router.feed import KvFeed
from headrace.core.router.predict import Predictor, Terms
from headrace.core.router.worker import Booking, Worker
from support.routing import load, spec

FRESH_NS = 2 * NS_PER_S


class Bench:
    def __init__(self) -> None:
        up = WorkerUp(worker_id=WorkerId(0), name="w", spec=spec())
        self.worker = Worker(up, 1, Predictor.of(up), Breaker(RouterConfig()), KvFeed())

    def book(self, request_id: int, num_tokens: int = 512, now: int = 0) -> Booking:
        request = RouteRequest(request_id=request_id, block_names=(), num_tokens=num_tokens)
        terms = Terms(self.worker.predictor, num_tokens, 0)
        booking = Booking(Ns(now), request, self.worker, terms, num_tokens)
        self.worker.book(booking)
        return booking

    def hear(self, now: int = 0, received: int | None = None, **fields: float | None) -> bool:
        heard = self.worker.reconcile(Ns(now), load(**fields), received, FRESH_NS)
        self.worker.check()
        return heard

    def due_ns(self, now: int = 0) -> int:
        return self.worker.due_ns(Ns(now))


def test_what_is_booked_is_due_until_its_prefill_is_over() -> None:
    bench = Bench()
    one, two = bench.book(1), bench.book(2, 64)
    assert bench.due_ns() == one.prefill_ns + two.prefill_ns
    bench.worker.start(Ns(0), one)
    assert bench.due_ns() == two.prefill_ns
    assert bench.worker.num_seqs == 2
    bench.worker.release(Ns(0), one)
    bench.worker.release(Ns(0), two)
    bench.worker.check()
    assert (bench.due_ns(), bench.worker.num_seqs, bench.worker.output_extra_ns) == (0, 0, 0)


def test_the_workers_word_holds_for_what_it_had_received() -> None:
    bench = Bench()
    one = bench.book(1, 512)
    two = bench.book(2, 512)
    bench.hear(received=1, num_running=1, num_queued_prefill_tokens=256)
    # Half of the first is done; the second was on its way when the worker counted.
    assert bench.due_ns() == one.prefill_ns // 2 + two.prefill_ns
    bench.hear(received=2, num_running=2, num_queued_prefill_tokens=768)
    assert bench.due_ns() == one.prefill_ns // 2 + two.prefill_ns
    assert bench.worker.num_seqs == 2


def test_what_others_sent_is_foreign_and_counts_once() -> None:
    bench = Bench()
    one = bench.book(1, 512)
    bench.hear(received=1, num_running=3, num_queued_prefill_tokens=1024, num_kv_tokens=900)
    foreign_ns = bench.worker.predictor.backlog_ns(512)
    assert bench.due_ns() == one.prefill_ns + foreign_ns
    assert bench.worker.num_seqs == 3
    bench.worker.release(Ns(0), one)
    assert bench.due_ns() == foreign_ns
    assert bench.worker.num_seqs == 2


def test_without_a_count_of_what_arrived_nothing_counts_twice() -> None:
    bench = Bench()
    one = bench.book(1, 512)
    bench.hear(num_running=1, num_queued_prefill_tokens=512)
    assert bench.due_ns() == one.prefill_ns
    two = bench.book(2, 512)
    bench.hear(num_running=1, num_queued_prefill_tokens=256)
    assert bench.due_ns() == one.prefill_ns // 2 + two.prefill_ns
    assert bench.worker.num_seqs == 2


def test_time_is_progress_as_long_as_the_worker_speaks() -> None:
    bench = Bench()
    one = bench.book(1, 4096)
    assert one.prefill_ns > 3 * FRESH_NS // 2
    bench.hear(received=1, num_running=1, num_queued_prefill_tokens=4096)
    assert bench.due_ns(100 * NS_PER_MS) == one.prefill_ns - 100 * NS_PER_MS
    assert bench.due_ns(60 * NS_PER_S) == max(0, one.prefill_ns - FRESH_NS)
    bench.book(2, 16, now=100 * NS_PER_MS)  # settles what has passed
    bench.worker.check()
    assert one.remaining_ns == one.prefill_ns - 100 * NS_PER_MS


def test_a_worker_that_says_it_is_idle_after_a_wrong_prediction_is_idle() -> None:
    bench = Bench()
    one = bench.book(1)
    bench.worker.start(Ns(0), one)
    bench.hear(received=1)
    assert bench.due_ns() == 0
    assert bench.worker.num_seqs == 1  # until its end is told


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1])
@pytest.mark.parametrize("field", ["num_running", "num_queued_prefill_tokens", "num_kv_tokens"])
def test_a_figure_that_makes_no_sense_changes_nothing(wrong: float, field: str) -> None:
    bench = Bench()
    bench.book(1)
    bench.hear(received=1, num_running=1, num_queued_prefill_tokens=512)
    before = bench.due_ns(), bench.worker.num_seqs, bench.worker.fresh_until_ns
    assert not bench.hear(now=10, received=1, **{field: wrong})
    assert (bench.due_ns(), bench.worker.num_seqs, bench.worker.fresh_until_ns) == before


def test_room_is_what_is_free_without_what_is_on_its_way() -> None:
    bench = Bench()
    bench.book(1, 512)
    assert bench.worker.tokens_left == 1024 * 16 - 512
    bench.hear(received=0, num_running=1, num_free_blocks=100, num_cached_blocks=50)
    assert bench.worker.tokens_left == 150 * 16 - 512
    bench.hear(received=1, num_running=1, num_free_blocks=100)
    assert bench.worker.tokens_left == 100 * 16
    # It waits there, and holds nothing yet.
    bench.hear(received=1, num_waiting=1, num_free_blocks=100)
    assert bench.worker.tokens_left == 100 * 16 - 512


def test_decoding_sequences_make_others_slower() -> None:
    bench = Bench()
    one = bench.book(1)
    bench.worker.start(Ns(0), one)
    few = bench.worker.output_extra_ns, bench.worker.step_extra_ns
    bench.worker.progress(one, 100)
    two = bench.book(2)
    bench.worker.start(Ns(0), two)
    assert bench.worker.output_extra_ns > few[0] > 0
    assert bench.worker.step_extra_ns > few[1] > 0
    bench.worker.check()


def test_sums_that_are_wrong_are_loud() -> None:
    bench = Bench()
    booking = bench.book(1)
    booking.remaining_ns -= 1
    with pytest.raises(InvariantError, match="miscounted"):
        bench.worker.check()


def test_what_a_worker_does_not_tell_stays_as_booked() -> None:
    bench = Bench()
    one, _ = bench.book(1, 512), bench.book(2, 512)
    before = bench.worker.tokens_left
    untold = {"num_queued_prefill_tokens": None, "num_kv_tokens": None, "num_free_blocks": None}
    assert bench.hear(now=one.prefill_ns // 2, num_running=5, **untold)
    # Time that passes is still taken for progress; only the sequences of others are news.
    assert bench.due_ns(one.prefill_ns // 2) == one.prefill_ns // 2 + one.prefill_ns
    assert bench.worker.num_seqs == 5
    assert bench.worker.tokens_left == before
