"""RouterCore: the machine that gives each request a worker. Events in, effects out.

It owns the requests' ways: where each is, or that it waits. What a worker has to do is `worker`'s
matter, what it has cached `index`'s, what a request would cost there `pricing`'s, who waits longest
for good reasons `waiting`'s.
"""

from typing import assert_never

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import CallAt, Timer
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.caches import Caches, LateKv
from headrace.core.router.choices import Choices
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
    WorkerRole,
    WorkersStarting,
    WorkerStats,
    WorkerUp,
)
from headrace.core.router.explain import Choice, DecisionLog, explain
from headrace.core.router.fleet import Fleet, LateLoads, Survey
from headrace.core.router.predict import Quote
from headrace.core.router.pricing import Pricing
from headrace.core.router.refusal import Noun, find_fault, lateness, no_worker, queue_full, too_late
from headrace.core.router.stats import RouterStats
from headrace.core.router.waiting import Waiting, WaitingRoom
from headrace.core.router.worker import Booking, Worker

# Timers carry the id of the request whose deadline they are about, or this one. It rings every
# second while anybody waits, so that nobody waits for an event that never comes.
WATCH_TIMER = -1
WATCH_NS = Ns(NS_PER_S)


class RouterCore:
    """`handle(now, event) -> effects`."""

    def __init__(
        self,
        config: RouterConfig,
        late_kv: LateKv | None = None,
        loads: LateLoads | None = None,
        *,
        noun: Noun = Noun.WORKER,
    ) -> None:
        self.config = config
        self._noun = noun
        self._fleet = Fleet(config, loads)
        self._caches = Caches(config, self._fleet, late_kv)
        self._room = WaitingRoom()
        self._choices = Choices(config, self._fleet, self._caches, self._room)
        self._bookings: dict[int, Booking] = {}
        self._decisions = DecisionLog(config.kept_decisions)
        self._num_dispatched = self._num_rejected = 0
        self._num_queried_blocks = self._num_hit_blocks = 0
        # Workers that may have got room by this event, in order.
        self._freed: dict[Worker, None] = {}
        self._is_watching = False  # a WATCH_TIMER is set
        self._num_starting = 0  # workers
        self._now = Ns(0)

    # ---- queries

    def decision(self, request_id: int) -> Decision | None:
        """Why the request went where it went last; None once it is forgotten."""
        return self._decisions.find(request_id)

    def quote(
        self, now: Ns, request: RouteRequest, source_id: WorkerId | None = None
    ) -> Quote | None:
        """The least predicted cost of the request; None where nobody takes its role. `source_id`
        would compute the prompt of one that is coming.
        """
        source = None if source_id is None else self._fleet.find(source_id)
        return self._choices.quote(now, request, self._fleet.survey(now, request), source)

    def due_ns(self, now: Ns, worker_id: WorkerId) -> int:
        """Prefill that is due at this worker, in ns; 0 where it is not up."""
        return self._fleet.due_ns(now, worker_id)

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    def stats(self) -> RouterStats:
        return RouterStats(
            num_workers=len(self._fleet),
            num_open_breakers=sum(not worker.breaker.is_closed for worker in self._fleet),
            num_unsynced_workers=sum(not worker.feed.is_whole for worker in self._fleet),
            num_waiting=len(self._room),
            num_in_flight=len(self._bookings),
            num_replicas=self._caches.index.num_replicas,
            num_dispatched=self._num_dispatched,
            num_rejected=self._num_rejected,
            num_resyncs=self._caches.num_resyncs,
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
        self._room.check()
        self._caches.index.check()

    # ---- the machine

    def handle(self, now: Ns, event: RouterEvent) -> list[RouterEffect]:
        if now < self._now:
            raise InvariantError("time went back", last=self._now, now=now)
        self._now = now
        effects: list[RouterEffect] = []
        match event:
            case WorkerStats() | WorkerKv() | WorkerKvSnapshot() | WorkerDrain() | WorkerRole():
                self._heard(now, event, effects)
            case RouteArrive(request):
                self._arrive(now, request, effects)
            case RouteStarted(request_id):
                self._started(now, request_id)
            case RouteProgress(request_id, num_output_tokens):
                if (booking := self._bookings.get(request_id)) is not None:
                    self._fleet.current(booking.worker).progress(booking, num_output_tokens)
                return effects  # nobody gets room by it
            case RouteDone(request_id):
                self._done(now, request_id)
            case RouteFailed(request_id):
                self._failed(now, request_id)
            case Timer(timer_id):
                self._timer(now, timer_id, effects)
            case WorkerUp():
                self._freed[self._fleet.add(now, event, self._caches.index.open_slot())] = None
            case WorkerDown(worker_id, _, is_failure):
                if (worker := self._fleet.find(worker_id)) is not None:
                    self._down(now, worker, is_failure)
            case WorkersStarting(num_workers):
                self._num_starting = num_workers
            case _:
                assert_never(event)
        self._caches.index.tend(now)
        if len(self._room):
            for worker in self._freed:
                self._serve(now, worker, effects)
            if len(self._room) and not self._is_watching:
                self._is_watching = True
                effects.append(CallAt(Ns(now + WATCH_NS), WATCH_TIMER))
        self._freed.clear()
        return effects

    # ---- requests

    def _arrive(self, now: Ns, request: RouteRequest, effects: list[RouterEffect]) -> None:
        self._forget(now, request.request_id)
        if request.deadline_ns is not None and request.deadline_ns <= now:
            self._reject(too_late(request.request_id, self._noun), effects)
            return
        waiting = Waiting(now, request)
        survey = self._fleet.survey(now, request)
        pricing = self._price(now, request)
        if (fault := find_fault(request, survey, self._fleet, self._noun)) is not None:
            self._reject(fault, effects)
            return
        if self.config.refuse_late and not request.is_migration:
            late = lateness(now, request, survey, pricing, self._fleet, self._room)
            if late is not None:
                self._reject(late, effects)
                return
        # Who waits for any room goes first, unless this one is to overtake.
        may_go = request.is_migration or not self._room.held_ns(None)
        best = self._choices.choose(survey, pricing) if may_go else None
        if best is not None and best.has_room and not self._room.owes(now, best.worker, request):
            self._dispatch(waiting, best, survey, pricing, effects)
        elif len(self._room) >= self.config.max_waiting_requests and not request.is_migration:
            retry_s = max(1.0, self._room.prefill_ns / max(1, len(self._fleet)) / NS_PER_S)
            self._reject(
                queue_full(request.request_id, len(self._room), retry_s, self._noun), effects
            )
        else:
            self._wait(survey, pricing, best, effects)

    def _wait(
        self, survey: Survey, pricing: Pricing, best: Choice | None, effects: list[RouterEffect]
    ) -> None:
        now, request = pricing.now, pricing.request
        prefill_ns = self._fleet.any_predictor.prefill_ns(max(1, request.num_tokens), 0)
        waiting = self._room.add(now, request, prefill_ns)
        if best is not None:
            self._hold(waiting, best, pricing)
        effects.append(Queued(request.request_id, survey.waits_for))
        if request.deadline_ns is not None:
            effects.append(CallAt(request.deadline_ns, request.request_id))
        self._freed.update(dict.fromkeys(survey.usable[:1]))

    def _started(self, now: Ns, request_id: int) -> None:
        booking = self._bookings.get(request_id)
        if booking is None or booking.is_started:
            return
        worker = self._fleet.current(booking.worker)
        worker.start(now, booking)
        self._freed[worker] = None
        self._caches.computed(booking)
        self._decisions.observe(request_id, (now - booking.decided_ns) / NS_PER_MS)

    def _done(self, now: Ns, request_id: int) -> None:
        booking = self._bookings.get(request_id)
        if booking is not None and booking.is_probe and booking.is_started:
            booking.worker.breaker.succeed(now)
        self._forget(now, request_id)

    def _failed(self, now: Ns, request_id: int) -> None:
        booking = self._bookings.get(request_id)
        if booking is not None:
            booking.worker.breaker.fail(now)
        self._forget(now, request_id)

    def _forget(self, now: Ns, request_id: int) -> None:
        """The request is nowhere."""
        self._room.remove(request_id)
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            worker = self._fleet.current(booking.worker)
            worker.release(now, booking)
            self._freed[worker] = None
            if booking.is_probe:
                worker.breaker.is_probed = False
            self._caches.gone(booking)

    def _reject(self, effect: RouteReject, effects: list[RouterEffect]) -> None:
        self._num_rejected += 1
        effects.append(effect)

    def _timer(self, now: Ns, timer_id: int, effects: list[RouterEffect]) -> None:
        if timer_id == WATCH_TIMER:
            self._is_watching = False
            self._freed.update(dict.fromkeys(self._fleet))
            self._refuse_lonely(now, effects)
        waiting = self._room.find(timer_id)
        deadline_ns = waiting.request.deadline_ns if waiting else None
        if deadline_ns is not None and deadline_ns <= now:
            self._room.remove(timer_id)
            self._reject(too_late(timer_id, self._noun), effects)

    def _refuse_lonely(self, now: Ns, effects: list[RouterEffect]) -> None:
        """Refuse those that have waited long enough while nobody is there who could take them, nor
        about to be.
        """
        if self._num_starting:
            return
        wait_ns = round(self.config.worker_wait_s * NS_PER_S)
        for waiting in list(self._room):
            is_due = now - waiting.since_ns >= wait_ns
            if is_due and self._fleet.survey(now, waiting.request).is_lonely:
                request_id = waiting.request.request_id
                self._room.remove(request_id)
                self._reject(no_worker(request_id, self.config.worker_wait_s, self._noun), effects)

    # ---- places

    def _price(self, now: Ns, request: RouteRequest) -> Pricing:
        prompt = self._bookings.get(request.prompt_id) if request.is_coming else None
        return self._choices.price(now, request, None if prompt is None else prompt.worker)

    def _dispatch(
        self,
        waiting: Waiting,
        best: Choice,
        survey: Survey,
        pricing: Pricing,
        effects: list[RouterEffect],
    ) -> None:
        request, worker = waiting.request, best.worker
        decision = explain(self.config.policy, waiting, best, survey, pricing)
        booking = self._book(pricing, worker)
        self._room.charge(
            request.tenant,
            booking.num_uncached + min(request.max_tokens, self.config.expected_output_tokens),
        )
        self._decisions.keep(decision, request.prompt_id)
        effects.append(Dispatch(request.request_id, worker.worker_id, decision))

    def _hold(self, waiting: Waiting, best: Choice, pricing: Pricing) -> None:
        self._room.hold(waiting, best.worker.worker_id, pricing.terms(best.worker).prefill_ns)

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
        self._caches.expect(booking)
        self._num_dispatched += 1
        self._num_queried_blocks += len(request.block_names)
        self._num_hit_blocks += num_hits
        return booking

    def _serve(self, now: Ns, worker: Worker, effects: list[RouterEffect]) -> None:
        """This worker may have room: whose turn is it?"""
        most_due_ns = round(self.config.worker_queue_ms * NS_PER_MS)
        while len(self._room) and worker.due_ns(now) <= most_due_ns and worker.seqs_left > 0:
            for waiting in self._room.heads(now, worker.worker_id):
                if self._serve_one(now, waiting, effects):
                    break
                if waiting.held_for in (None, worker.worker_id) and waiting.is_passed_over(now):
                    return
            else:
                return

    def _serve_one(self, now: Ns, waiting: Waiting, effects: list[RouterEffect]) -> bool:
        """Whether it waits no longer, or has got a place to wait at."""
        request = waiting.request
        survey = self._fleet.survey(now, request)
        if (fault := find_fault(request, survey, self._fleet, self._noun)) is not None:
            self._room.remove(request.request_id)
            self._reject(fault, effects)
            return True
        pricing = self._price(now, request)
        best = self._choices.choose(survey, pricing)
        if best is None:
            return False
        if not best.has_room:
            had_no_place = waiting.held_for is None
            self._hold(waiting, best, pricing)
            return had_no_place
        self._room.remove(request.request_id)
        self._dispatch(waiting, best, survey, pricing, effects)
        return True

    # ---- workers

    def _heard(
        self,
        now: Ns,
        event: WorkerDrain | WorkerRole | WorkerStats | WorkerKv | WorkerKvSnapshot,
        effects: list[RouterEffect],
    ) -> None:
        worker = self._fleet.find(event.worker_id)
        if worker is None:
            return  # its last words overtaken by the news of its end
        match event:
            case WorkerStats():
                self._fleet.hear(now, event)
                self._freed[worker] = None
            case WorkerDrain():
                self._fleet.drain(worker)
                self._give_up(worker)
            case WorkerRole(_, role):
                self._fleet.set_role(worker, role)
                self._give_up(worker)
                self._freed[worker] = None
            case WorkerKv() | WorkerKvSnapshot():
                if self._caches.hear(now, worker, event):
                    effects.append(Resync(worker.worker_id))

    def _down(self, now: Ns, worker: Worker, is_failure: bool) -> None:
        if is_failure:
            worker.breaker.fail(now)
        for booking in worker.bookings():
            self._forget(now, booking.request.request_id)
        self._caches.index.close_slot(worker.bit)
        self._fleet.remove(worker)
        self._give_up(worker)

    def _give_up(self, worker: Worker) -> None:
        """Whoever waits for this worker may have any other."""
        self._room.let_go(worker.worker_id)
        self._freed.update(dict.fromkeys(self._fleet))
        self._freed.pop(worker, None)
