"""RouterCore: the machine that gives each request a worker. Events in, effects out.

It owns the requests' ways: where each is, or that it waits. What a worker has to do is `worker`'s
matter, what it has cached `index`'s, what a request would cost there `pricing`'s, who waits longest
for good reasons `waiting`'s.
"""

from typing import assert_never

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import CallAt, Timer
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns
from headrace.core.config.schema import RouterConfig
from headrace.core.router.decision import Decision
from headrace.core.router.events import (
    Dispatch,
    Queued,
    Resync,
    RouteArrive,
    RouteDone,
    RouteFailed,
    RouteProgress,
    RouterEffect,
    RouteReject,
    RouteRequest,
    RouterEvent,
    RouteStarted,
    WorkerDown,
    WorkerDrain,
    WorkerKv,
    WorkerKvSnapshot,
    WorkerStats,
    WorkerUp,
)
from headrace.core.router.explain import DecisionLog, explain
from headrace.core.router.fleet import Fleet, Survey
from headrace.core.router.index import PrefixIndex
from headrace.core.router.policies import Chooser
from headrace.core.router.predict import Predictor
from headrace.core.router.pricing import Pricing
from headrace.core.router.refusal import find_fault, lateness, no_worker, queue_full, too_late
from headrace.core.router.stats import RouterStats
from headrace.core.router.waiting import Waiting, WaitingRoom
from headrace.core.router.worker import Booking, Worker

# A head that fits nowhere is overtaken for that long at most.
OVERTAKE_NS = Ns(2 * NS_PER_S)
# Timers carry the id of the request whose deadline they are about, or one of these.
PROBE_TIMER = -1  # a breaker lets a probe through
LONELY_TIMER = -2  # nobody was there who could take a request


class RouterCore:
    """`handle(now, event) -> effects`."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._fleet = Fleet(config)
        self._index = PrefixIndex(Ns(round(config.index_ttl_s * NS_PER_S)))
        self._chooser = Chooser(config.seed)
        self._room = WaitingRoom()
        self._bookings: dict[int, Booking] = {}
        self._decisions = DecisionLog(config.kept_decisions)
        self._prior = Predictor(None, step_tokens=512, block_size=16, block_bytes=0)
        self._num_dispatched = self._num_rejected = self._num_resyncs = 0
        self._num_queried_blocks = self._num_hit_blocks = 0
        self._now = Ns(0)

    # ---- queries

    def decision(self, request_id: int) -> Decision | None:
        """Why the request went where it went last; None once it is forgotten."""
        return self._decisions.find(request_id)

    def stats(self) -> RouterStats:
        return RouterStats(
            num_workers=len(self._fleet),
            num_open_breakers=sum(not worker.breaker.is_closed for worker in self._fleet),
            num_unsynced_workers=sum(not worker.feed.is_whole for worker in self._fleet),
            num_waiting=len(self._room),
            num_in_flight=len(self._bookings),
            num_replicas=self._index.num_replicas,
            num_dispatched=self._num_dispatched,
            num_rejected=self._num_rejected,
            num_resyncs=self._num_resyncs,
            num_queried_blocks=self._num_queried_blocks,
            num_hit_blocks=self._num_hit_blocks,
        )

    def check(self) -> None:
        """Raise InvariantError unless every request is in one place and every sum is right."""
        booked = {id(booking) for worker in self._fleet for booking in worker.bookings()}
        if booked != {id(booking) for booking in self._bookings.values()}:
            raise InvariantError("booking lost", booked=len(booked), known=len(self._bookings))
        both = [w.request.request_id for w in self._room if w.request.request_id in self._bookings]
        if both:
            raise InvariantError("requests wait and run", request_ids=both)
        for worker in self._fleet:
            worker.check()
        self._index.check()

    # ---- the machine

    def handle(self, now: Ns, event: RouterEvent) -> list[RouterEffect]:
        if now < self._now:
            raise InvariantError("time went back", last=self._now, now=now)
        self._now = now
        effects: list[RouterEffect] = []
        match event:
            case RouteArrive(request):
                self._arrive(now, request, effects)
            case RouteStarted(request_id):
                self._started(now, request_id)
            case RouteProgress(request_id, num_output_tokens):
                if (booking := self._bookings.get(request_id)) is not None:
                    booking.worker.progress(booking, num_output_tokens)
            case RouteDone(request_id):
                self._done(now, request_id)
            case RouteFailed(request_id):
                self._failed(now, request_id, effects)
            case Timer(timer_id):
                self._timer(now, timer_id, effects)
            case WorkerUp():
                self._fleet.add(now, event, self._index.open_slot())
            case WorkerDown(worker_id, _, is_failure):
                if (worker := self._fleet.find(worker_id)) is not None:
                    self._down(now, worker, is_failure, effects)
            case WorkerDrain() | WorkerStats() | WorkerKv() | WorkerKvSnapshot():
                self._heard(now, event, effects)
            case _:
                assert_never(event)
        self._index.tend(now)
        if len(self._room) and self._may_have_made_room(now, event):
            self._serve_waiting(now, effects)
        return effects

    # ---- requests

    def _arrive(self, now: Ns, request: RouteRequest, effects: list[RouterEffect]) -> None:
        self._forget(now, request.request_id)
        if request.deadline_ns is not None and request.deadline_ns <= now:
            self._reject(too_late(request.request_id), effects)
            return
        survey = self._fleet.survey(now, request)
        pricing = self._price(now, request)
        if (fault := find_fault(request, survey, self._fleet)) is not None:
            self._reject(fault, effects)
            return
        if self.config.refuse_late and not request.is_migration:
            late = lateness(now, request, survey, pricing, self._fleet, self._room)
            if late is not None:
                self._reject(late, effects)
                return
        # Who waits is served first, unless this one is to overtake.
        if survey.usable and (not len(self._room) or request.is_migration):
            self._dispatch(now, Waiting(request, now, 0, 0), survey, pricing, effects)
            return
        if len(self._room) >= self.config.max_waiting_requests and not request.is_migration:
            retry_s = max(1.0, self._room.prefill_ns / max(1, len(self._fleet)) / NS_PER_S)
            self._reject(queue_full(request.request_id, len(self._room), retry_s), effects)
            return
        self._wait(now, request, survey, effects)

    def _wait(
        self, now: Ns, request: RouteRequest, survey: Survey, effects: list[RouterEffect]
    ) -> None:
        predictor = next((worker.predictor for worker in self._fleet), self._prior)
        self._room.add(now, request, predictor.prefill_ns(max(1, request.num_tokens), 0))
        effects.append(Queued(request.request_id, survey.waits_for))
        if request.deadline_ns is not None:
            effects.append(CallAt(request.deadline_ns, request.request_id))
        if survey.is_lonely:
            effects.append(CallAt(Ns(now + self._lonely_ns), LONELY_TIMER))
        if survey.usable:
            self._serve_waiting(now, effects)

    @property
    def _lonely_ns(self) -> int:
        return round(self.config.worker_wait_s * NS_PER_S)

    def _started(self, now: Ns, request_id: int) -> None:
        booking = self._bookings.get(request_id)
        if booking is None or booking.is_started:
            return
        worker = booking.worker
        worker.start(now, booking)
        self._index.stop_expecting(worker.bit, booking.new_names)
        if not self._publishes(worker):
            self._index.remember(worker.bit, booking.request.block_names)
        self._decisions.observe(request_id, (now - booking.decided_ns) / NS_PER_MS)

    def _done(self, now: Ns, request_id: int) -> None:
        booking = self._bookings.get(request_id)
        if booking is not None and booking.is_probe and booking.is_started:
            booking.worker.breaker.succeed()
        self._forget(now, request_id)

    def _failed(self, now: Ns, request_id: int, effects: list[RouterEffect]) -> None:
        booking = self._bookings.get(request_id)
        if booking is not None:
            self._count_failure(now, booking.worker, effects)
        self._forget(now, request_id)

    def _forget(self, now: Ns, request_id: int) -> None:
        """The request is nowhere."""
        self._room.remove(request_id)
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            worker = booking.worker
            worker.release(now, booking)
            if booking.is_probe:
                worker.breaker.is_probed = False
            if not booking.is_started:
                self._index.stop_expecting(worker.bit, booking.new_names)

    def _reject(self, effect: RouteReject, effects: list[RouterEffect]) -> None:
        self._num_rejected += 1
        effects.append(effect)

    def _timer(self, now: Ns, timer_id: int, effects: list[RouterEffect]) -> None:
        if timer_id == LONELY_TIMER:
            self._refuse_lonely(now, effects)
            return
        waiting = self._room.find(timer_id)
        deadline_ns = waiting.request.deadline_ns if waiting else None
        if deadline_ns is not None and deadline_ns <= now:
            self._room.remove(timer_id)
            self._reject(too_late(timer_id), effects)

    def _refuse_lonely(self, now: Ns, effects: list[RouterEffect]) -> None:
        """Refuse those that have waited long enough while nobody is there who could take them."""
        for waiting in list(self._room):
            is_due = now - waiting.since_ns >= self._lonely_ns
            if is_due and self._fleet.survey(now, waiting.request).is_lonely:
                request_id = waiting.request.request_id
                self._room.remove(request_id)
                self._reject(no_worker(request_id, self.config.worker_wait_s), effects)

    # ---- choices

    def _price(self, now: Ns, request: RouteRequest) -> Pricing:
        hits = self._index.match(request.block_names)
        return Pricing(now, request, self.config, self._fleet, hits)

    def _dispatch(
        self,
        now: Ns,
        waiting: Waiting,
        survey: Survey,
        pricing: Pricing,
        effects: list[RouterEffect],
    ) -> None:
        """Send a request to the best of the usable workers, of which there is one at least."""
        request, workers = waiting.request, survey.usable
        loads = pricing.loads(workers)
        totals = pricing.totals(workers, loads)
        index, num_tied = self._chooser.choose(
            self.config.policy, workers, totals, loads, pricing, self._fleet
        )
        worker = workers[index]
        decision = explain(
            self.config.policy, waiting, survey, pricing, totals, loads, index, num_tied
        )
        booking = self._book(pricing, worker)
        self._room.charge(
            request.tenant,
            booking.num_uncached + min(request.max_tokens, self.config.expected_output_tokens),
        )
        self._decisions.keep(decision)
        effects.append(Dispatch(request.request_id, worker.worker_id, decision))

    def _book(self, pricing: Pricing, worker: Worker) -> Booking:
        request, num_hits = pricing.request, pricing.num_hit_blocks(worker)
        booking = Booking(
            pricing.now, request, worker, pricing.terms(worker), pricing.num_new_tokens(worker)
        )
        booking.new_names = request.block_names[num_hits:]
        if not worker.breaker.is_closed:
            booking.is_probe = worker.breaker.is_probed = True
        worker.book(booking)
        self._bookings[request.request_id] = booking
        self._index.expect(worker.bit, booking.new_names)
        self._num_dispatched += 1
        self._num_queried_blocks += len(request.block_names)
        self._num_hit_blocks += num_hits
        return booking

    def _may_have_made_room(self, now: Ns, event: RouterEvent) -> bool:
        match event:
            case WorkerStats(worker_id):
                worker = self._fleet.find(worker_id)
                return worker is not None and worker.due_ns(now) <= self._most_due_ns
            case RouteArrive() | RouteProgress() | WorkerKv() | WorkerKvSnapshot():
                return False
            case _:
                return True

    @property
    def _most_due_ns(self) -> int:
        return round(self.config.worker_queue_ms * NS_PER_MS)

    def _serve_waiting(self, now: Ns, effects: list[RouterEffect]) -> None:
        while self._serve_one(now, effects):
            pass

    def _serve_one(self, now: Ns, effects: list[RouterEffect]) -> bool:
        for waiting in self._room.heads(now):
            request = waiting.request
            survey = self._fleet.survey(now, request)
            if (fault := find_fault(request, survey, self._fleet)) is not None:
                self._room.remove(request.request_id)
                self._reject(fault, effects)
                return True
            if survey.usable:
                self._room.remove(request.request_id)
                self._dispatch(now, waiting, survey, self._price(now, request), effects)
                return True
            if now - waiting.since_ns > OVERTAKE_NS:
                return False
        return False

    # ---- workers

    def _publishes(self, worker: Worker) -> bool:
        """Whether its cache is known from its own word; `prefix` goes by what it sent alone."""
        return worker.up.publishes_kv and self.config.policy != "prefix"

    def _heard(
        self,
        now: Ns,
        event: WorkerDrain | WorkerStats | WorkerKv | WorkerKvSnapshot,
        effects: list[RouterEffect],
    ) -> None:
        worker = self._fleet.find(event.worker_id)
        if worker is None:
            return  # its last words overtaken by the news of its end
        match event:
            case WorkerDrain():
                self._fleet.drain(worker)
                self._watch_lonely(now, effects)
            case WorkerStats(_, load, num_received):
                stale_ns = round(self.config.stats_stale_ms * NS_PER_MS)
                worker.reconcile(now, load, num_received, stale_ns)
            case WorkerKv() | WorkerKvSnapshot() if not self._publishes(worker):
                pass
            case WorkerKv(_, first_seq_no, changes):
                fresh, asks = worker.feed.take(now, first_seq_no, changes)
                self._index.apply(worker.bit, fresh)
                self._resync(worker, asks, effects)
            case WorkerKvSnapshot(_, seq_no, names):
                self._load_snapshot(now, worker, seq_no, names, effects)

    def _load_snapshot(
        self,
        now: Ns,
        worker: Worker,
        seq_no: int,
        names: tuple[bytes, ...],
        effects: list[RouterEffect],
    ) -> None:
        """A new place in the index forgets the old one at once, however much it held."""
        self._index.close_slot(worker.bit)
        self._fleet.move(worker, self._index.open_slot())
        self._index.load(worker.bit, names)
        later, asks = worker.feed.restart(now, seq_no)
        for changes in later:
            self._index.apply(worker.bit, changes)
        for booking in worker.bookings():
            if not booking.is_started:
                self._index.expect(worker.bit, booking.new_names)
        self._resync(worker, asks, effects)

    def _resync(self, worker: Worker, asks: bool, effects: list[RouterEffect]) -> None:
        if asks:
            self._num_resyncs += 1
            effects.append(Resync(worker.worker_id))

    def _down(self, now: Ns, worker: Worker, is_failure: bool, effects: list[RouterEffect]) -> None:
        if is_failure:
            self._count_failure(now, worker, effects)
        for booking in worker.bookings():
            self._forget(now, booking.request.request_id)
        self._index.close_slot(worker.bit)
        self._fleet.remove(worker)
        self._watch_lonely(now, effects)

    def _watch_lonely(self, now: Ns, effects: list[RouterEffect]) -> None:
        """There is one worker less; look after a while whether anybody waits for nobody."""
        if len(self._room):
            effects.append(CallAt(Ns(now + self._lonely_ns), LONELY_TIMER))

    def _count_failure(self, now: Ns, worker: Worker, effects: list[RouterEffect]) -> None:
        worker.breaker.fail(now)
        if not worker.breaker.is_closed:
            # Somebody may wait for nothing but the first probe.
            effects.append(CallAt(worker.breaker.until_ns, PROBE_TIMER))
