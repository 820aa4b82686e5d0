"""A worker as the router sees it: its requests, booked by the router itself, reconciled with what
the worker tells about its load.

Decides what counts as work that is due there; refuses to know how a worker is chosen.

The router knows what it has sent, at once; the worker knows how far it has come and what others
have sent, a little later. `reconcile` makes one figure of both: for the requests that the worker
had received when it counted, its word holds; those sent since are added; what it has beyond is
foreign. So nothing counts twice.
"""

from typing import Final

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import Ns, WorkerId
from headrace.core.router.breaker import Breaker
from headrace.core.router.events import RouteRequest, WorkerLoad, WorkerUp
from headrace.core.router.feed import KvFeed
from headrace.core.router.predict import Predictor, Terms

SAME_SHARE: Final = 0.1  # by which figures of the same steps differ anyway
FOREVER: Final = 1 << 62  # nanoseconds, or anything else that has no end


class Booking:
    """A request at a worker, from Dispatch to its end."""

    __slots__ = (
        "decided_ns",
        "is_probe",
        "is_started",
        "new_names",
        "num_new_tokens",
        "num_output",
        "num_uncached",
        "number",
        "prefill_ns",
        "remaining_ns",
        "request",
        "worker",
    )

    def __init__(
        self, now: Ns, request: RouteRequest, worker: "Worker", terms: Terms, num_new_tokens: int
    ) -> None:
        self.request = request
        self.worker = worker
        self.decided_ns = now
        self.number = worker.num_dispatched  # among the worker's requests
        self.num_new_tokens = num_new_tokens  # that it will hold, beside its hits
        self.num_uncached = terms.num_uncached
        self.prefill_ns = self.remaining_ns = terms.prefill_ns  # the latter: as far as is known
        self.new_names: tuple[bytes, ...] = ()  # of blocks that it will compute
        self.num_output = 0
        self.is_started = False
        self.is_probe = False

    @property
    def num_kv_tokens(self) -> int:
        return self.request.num_tokens + self.num_output


class Worker:
    """Loads are integers, so that what is booked and released adds up to nothing."""

    __slots__ = (
        "_asked",
        "_drained_ns",
        "_foreign_kv_tokens",
        "_foreign_prefill_ns",
        "_foreign_seqs",
        "_num_dispatched_before",
        "_num_free_tokens",
        "_own_seqs",
        "_pending",
        "_queue_ns",
        "_started",
        "_started_kv_tokens",
        "_started_seqs",
        "_told_step_ns",
        "bit",
        "breaker",
        "busy_until_ns",
        "feed",
        "fresh_until_ns",
        "has_told",
        "is_draining",
        "most_tokens",
        "name",
        "num_dispatched",
        "num_seqs",
        "output_extra_ns",
        "own_predictor",
        "predictor",
        "seqs_left",
        "spec",
        "stats_ns",
        "step_extra_ns",
        "tokens_left",
        "up",
        "worker_id",
    )

    def __init__(
        self, up: WorkerUp, bit: int, predictor: Predictor, breaker: Breaker, feed: KvFeed
    ) -> None:
        self.own_predictor = Predictor.of(up)  # by what was measured when it started
        self._told_step_ns = 0.0
        self.has_told = False  # what its own steps are found to take
        self.up = up
        self.spec = up.spec
        self.most_tokens = min(up.spec.max_model_len, up.spec.num_blocks * up.spec.block_size)
        self.worker_id: WorkerId = up.worker_id
        self.name = up.name
        self.bit = bit  # in the index
        self.predictor = predictor
        self.breaker = breaker
        self.feed = feed
        self.is_draining = False
        self.num_dispatched = 0
        self.stats_ns: Ns | None = None  # when it told about its load, last
        # How long that counts. One that never told anything is judged by its bookings alone.
        self.fresh_until_ns = Ns(FOREVER)
        # Sums over bookings, and what is foreign:
        self.num_seqs = 0
        self.busy_until_ns = 0  # with the prefill that is due
        self.seqs_left = self.tokens_left = FOREVER  # what it has room for
        self.output_extra_ns = 0  # by which each token of another sequence would come later
        self.step_extra_ns = 0  # by which each step of prefill takes longer
        self._pending: dict[int, Booking] = {}  # in prefill or before, in the order of dispatch
        self._started: dict[int, Booking] = {}
        self._queue_ns = 0  # prefill that is due, at `_drained_ns`
        self._drained_ns = Ns(0)  # up to when the time that passes was taken for progress
        self._num_free_tokens = up.spec.num_blocks * up.spec.block_size  # of KV, cached included
        self._own_seqs = 0
        self._started_seqs = 0
        self._started_kv_tokens = 0
        self._foreign_prefill_ns = 0
        self._foreign_seqs = 0
        self._foreign_kv_tokens = 0
        self._num_dispatched_before = 0  # the last statistics
        # What the predictor was asked last: sequences, decoding, KV.
        self._asked: tuple[int, int, int] | None = (0, 0, 0)

    # ---- queries

    def bookings(self) -> list[Booking]:
        return [*self._pending.values(), *self._started.values()]

    def due_ns(self, now: Ns) -> int:
        """Prefill that is due now, if it works as predicted. Silence is not progress."""
        return max(0, self.busy_until_ns - min(now, self.fresh_until_ns))

    @property
    def full_step_ns(self) -> float:
        """Of prompts alone, by its own word: what its steps have shown, or else what it began
        with.
        """
        return self._told_step_ns or self.own_predictor.full_step_ns

    @property
    def num_decoding(self) -> int:
        """Sequences that have had their first token."""
        return self._started_seqs + self._foreign_seqs

    # ---- changes

    def tells(self, load: WorkerLoad) -> bool:
        """Whether its own steps are found to take something else than it said before."""
        told_ns, known_ns = load.full_step_ns or 0.0, self.full_step_ns
        self.has_told = self.has_told or told_ns > 0.0
        is_news = told_ns > 0.0 and abs(told_ns - known_ns) > SAME_SHARE * known_ns
        if is_news:
            self._told_step_ns = told_ns
        return is_news

    def predict_by(self, predictor: Predictor) -> None:
        """How fast it is is better known from another one that is as fast."""
        if predictor is not self.predictor:
            self.predictor, self._asked = predictor, None
            self._count()

    def book(self, booking: Booking) -> None:
        self._drain(booking.decided_ns)
        self._pending[booking.request.request_id] = booking
        self.num_dispatched += 1
        self._own_seqs += booking.request.num_choices
        self._queue_ns += booking.remaining_ns
        self._num_free_tokens -= booking.num_new_tokens
        self._count()

    def start(self, now: Ns, booking: Booking) -> None:
        """Its prefill is over."""
        self._drain(now)
        del self._pending[booking.request.request_id]
        self._started[booking.request.request_id] = booking
        self._queue_ns -= booking.remaining_ns
        booking.remaining_ns = 0
        booking.is_started = True
        self._started_seqs += booking.request.num_choices
        self._started_kv_tokens += booking.num_kv_tokens
        self._count()

    def progress(self, booking: Booking, num_output_tokens: int) -> None:
        if booking.is_started:
            self._started_kv_tokens += num_output_tokens - booking.num_output
        booking.num_output = num_output_tokens

    def release(self, now: Ns, booking: Booking) -> None:
        self._drain(now)
        if booking.is_started:
            del self._started[booking.request.request_id]
            self._started_seqs -= booking.request.num_choices
            self._started_kv_tokens -= booking.num_kv_tokens
        else:
            del self._pending[booking.request.request_id]
            self._queue_ns -= booking.remaining_ns
        self._own_seqs -= booking.request.num_choices
        self._num_free_tokens += booking.num_new_tokens
        self._count()

    def reconcile(self, now: Ns, load: WorkerLoad, num_received: int | None, fresh_ns: int) -> bool:
        """Take the worker's word. False where it makes no sense: then it is silent from here on,
        also where it never told anything before.
        """
        for figure in msgspec.structs.astuple(load):
            if figure is not None and not 0.0 <= figure < FOREVER:  # which NaN is not either
                self.fresh_until_ns = min(self.fresh_until_ns, Ns(now + fresh_ns))
                return False
        # Without its word on what it had received: what was sent before it spoke last time has
        # arrived, and of the rest none is taken for foreign.
        received = self._num_dispatched_before if num_received is None else num_received
        pending = [*self._pending.values()]
        seen = [booking for booking in pending if booking.number < received] if pending else []
        unseen = pending[len(seen) :]
        own = seen if num_received is not None else pending
        if load.num_queued_prefill_tokens is None:
            self._drain(now)
        else:
            self._reconcile_prefill(seen, unseen, own, int(load.num_queued_prefill_tokens))
        own_seqs = self._started_seqs + sum([booking.request.num_choices for booking in own])
        self._foreign_seqs = max(0, int(load.num_running + load.num_waiting) - own_seqs)
        if load.num_kv_tokens is not None:
            self._foreign_kv_tokens = max(0, int(load.num_kv_tokens) - self._started_kv_tokens)
        if load.num_free_blocks is not None:
            # Those that wait at the worker hold nothing yet.
            without = unseen + (seen[-int(load.num_waiting) :] if load.num_waiting >= 1 else [])
            num_blocks = int(load.num_free_blocks + load.num_cached_blocks)
            self._num_free_tokens = num_blocks * self.spec.block_size - sum(
                [booking.num_new_tokens for booking in without]
            )
        self._num_dispatched_before = self.num_dispatched
        self.stats_ns = self._drained_ns = now
        self.fresh_until_ns = Ns(now + fresh_ns)
        self._count()
        return True

    def _reconcile_prefill(
        self, seen: list[Booking], unseen: list[Booking], own: list[Booking], num_queued: int
    ) -> None:
        """What is done of the seen is taken to be done of the oldest."""
        if not self._pending:
            self._queue_ns = self._foreign_prefill_ns = self.predictor.backlog_ns(num_queued)
            return
        num_done = max(0, sum([booking.num_uncached for booking in seen]) - num_queued)
        for booking in seen:
            done = min(num_done, booking.num_uncached)
            rest = booking.num_uncached - done
            booking.remaining_ns = booking.prefill_ns * rest // booking.num_uncached
            num_done -= done
        for booking in unseen:
            booking.remaining_ns = booking.prefill_ns
        num_foreign = num_queued - sum([booking.num_uncached for booking in own])
        self._foreign_prefill_ns = self.predictor.backlog_ns(num_foreign)
        self._queue_ns = self._foreign_prefill_ns + sum(
            [booking.remaining_ns for booking in self._pending.values()]
        )

    def _drain(self, now: Ns) -> None:
        """Let the work that is due shrink by the time that has passed, oldest first."""
        rest = min(now, self.fresh_until_ns) - self._drained_ns
        self._drained_ns = now
        if rest <= 0 or not self._queue_ns:
            return
        done = min(rest, self._foreign_prefill_ns)
        self._foreign_prefill_ns -= done
        for booking in self._pending.values():
            if done == rest:
                break
            part = min(rest - done, booking.remaining_ns)
            booking.remaining_ns -= part
            done += part
        self._queue_ns -= done

    def _count(self) -> None:
        """What follows from the sums."""
        self.num_seqs = self._own_seqs + self._foreign_seqs
        self.busy_until_ns = self._drained_ns + self._queue_ns
        # An empty worker always has room: its own admission knows better what fits.
        is_empty = not self.num_seqs
        self.seqs_left = FOREVER if is_empty else self.up.max_running_seqs - self.num_seqs
        self.tokens_left = FOREVER if is_empty else self._num_free_tokens
        num_kv_tokens = self._started_kv_tokens + self._foreign_kv_tokens
        num_decoding = self.num_decoding
        asked = (self.num_seqs, num_decoding, num_kv_tokens)
        if asked != self._asked:
            self._asked = asked
            self.output_extra_ns = self.predictor.output_extra_ns(self.num_seqs, num_kv_tokens)
            self.step_extra_ns = self.predictor.step_extra_ns(num_decoding, num_kv_tokens)

    def check(self) -> None:
        """Raise InvariantError unless the sums are those of the bookings."""
        started = self._started.values()
        due_ns = sum(booking.remaining_ns for booking in self._pending.values())
        sums = (
            (due_ns + self._foreign_prefill_ns, self._queue_ns),
            (sum(booking.num_kv_tokens for booking in started), self._started_kv_tokens),
            (sum(booking.request.num_choices for booking in self.bookings()), self._own_seqs),
            (sum(booking.request.num_choices for booking in started), self._started_seqs),
        )
        for counted, kept in sums:
            if counted != kept:
                raise InvariantError(
                    "load miscounted", worker_id=self.worker_id, counted=counted, kept=kept
                )
