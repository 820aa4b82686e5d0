"""FrontCore: the machine that makes one engine of many workers. Events in, effects out.

What arrives and what comes of it looks as with an EngineCore; between the two, requests are
forwarded to workers. It owns the requests' lives over all the workers that they may meet: a request
whose worker is lost goes on elsewhere, from the last token that its reader has. Which worker is
RouterCore's choice.
"""

from collections.abc import Sequence
from typing import Final, assert_never

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    Admitted,
    Arrive,
    CallAt,
    Cancel,
    Computed,
    Emit,
    EndLease,
    Finish,
    Reject,
    Timer,
)
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.decision import Decision
from headrace.core.router.events import (
    Dispatch,
    Queued,
    Resync,
    RouteArrive,
    RouteDone,
    RouteFailed,
    RouteProgress,
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
from headrace.core.router.flight import Flight, Said, Word, check_flights
from headrace.core.router.front_events import (
    EndAll,
    Forward,
    FrontEffect,
    FrontEvent,
    WorkerResumed,
    WorkerSaid,
    WorkerStalled,
)
from headrace.core.router.handoffs import Legs, as_coming, as_prompt, is_worth_it
from headrace.core.router.members import Members

PROGRESS_TOKENS: Final = 256  # output after which the router hears of it again


class FrontCore:
    """`handle(now, event) -> effects`. An Arrive holds the sequences of one request.

    A request may lose `max_migrations` workers; with the next one it ends with an error. Workers
    that were asked to leave do not count.

    Where there are workers for prefill, one of them may compute its prompt and first token, while
    another copies the KV that is there by then, and then the rest, and goes on. If anything of that
    fails, what is missing is computed there, and if a worker falls silent in it, elsewhere.
    """

    def __init__(self, router: RouterCore, config: ClusterConfig) -> None:
        self._router = router
        self._config = config
        self._now = Ns(0)
        self._flights: dict[int, Flight] = {}
        self._flight_of: dict[SeqId, Flight] = {}
        self._legs = Legs()
        self._workers = Members()
        self._next_request_id = 0
        self._numbers: dict[str, int] = {}  # of the last requests, by their ids
        self.num_migrations = 0  # requests that went on elsewhere because their worker was lost
        self.num_handoffs = 0  # requests whose prompt was computed by another worker
        self.num_recalls = 0  # that did not wait in a hand-off for a worker that had stalled

    # ---- queries

    @property
    def num_living(self) -> int:
        return len(self._flight_of)

    @property
    def num_unrouted(self) -> int:
        """Sequences that wait for a worker."""
        return sum(len(flight) for flight in self._flights.values() if flight.worker_id is None)

    def num_at(self, worker_id: WorkerId) -> int:
        """Requests that are under way at this worker."""
        return sum(flight.worker_id == worker_id for flight in self._flights.values())

    def due_ns(self, now: Ns, worker_id: WorkerId) -> int:
        """As RouterCore.due_ns."""
        return self._router.due_ns(now, worker_id)

    def waiting_for(self) -> list[Role]:
        """What each request that waits for a worker asks of it."""
        return [flight.asks_for for flight in self._flights.values() if flight.worker_id is None]

    def decision(self, request_id: str) -> Decision | None:
        """Why a request went where it is, or was, last; None where that is forgotten."""
        return self._router.decision(self._numbers.get(request_id, -1))

    def check(self) -> None:
        """Raise InvariantError unless every sequence that lives is under way, once."""
        self._router.check()
        self._legs.check()
        check_flights(self._flights.values(), self._flight_of)

    # ---- the machine

    def handle(self, now: Ns, event: FrontEvent) -> list[FrontEffect]:
        if now < self._now:
            raise InvariantError("time went back", last=self._now, now=now)
        self._now = now
        effects: list[FrontEffect] = []
        match event:
            case WorkerStats() | WorkerKv() | WorkerKvSnapshot() | WorkersStarting() | Timer():
                self._route(event, effects)
            case Arrive(seqs):
                self._arrive(seqs, effects)
            case Cancel(seq_id, reason):
                self._cancel(seq_id, reason, effects)
            case EndAll(reason, error):
                self._end_all(reason, error, effects)
            case WorkerSaid(worker_id, words):
                for word in words:
                    self._hear(worker_id, word, effects)
            case WorkerDown(worker_id, reason):
                self._lose(event, effects)
            case WorkerUp():
                self._workers.add(event)
                self._route(event, effects)
                if self._workers.stalled():
                    self._pass_by(effects)
            case WorkerStalled(worker_id) | WorkerResumed(worker_id):
                self._workers.note(worker_id, is_stalled=isinstance(event, WorkerStalled))
                self._pass_by(effects)
            case WorkerDrain(worker_id):
                self._workers.drain(worker_id)
                self._route(event, effects)
                self._turn_aside(worker_id, effects)
                self._spare_prefill(effects)
            case WorkerRole(worker_id, role):
                self._workers.set_role(worker_id, role)
                self._route(event, effects)
                if role is Role.PREFILL:
                    self._turn_aside(worker_id, effects)
                self._spare_prefill(effects)
                if self._workers.stalled():
                    self._pass_by(effects)
            case _:
                assert_never(event)
        return effects

    # ---- readers

    def _arrive(self, seqs: tuple[SeqSpec, ...], effects: list[FrontEffect]) -> None:
        if not seqs:
            return
        flight = Flight(self._next_request_id, seqs)
        self._next_request_id += 1
        self._flights[flight.request_id] = flight
        self._numbers[seqs[0].request_id] = flight.request_id
        if len(self._numbers) > self._router.config.kept_decisions:
            del self._numbers[next(iter(self._numbers))]
        for spec in seqs:
            if spec.seq_id in self._flight_of:
                raise InvariantError("sequence id used twice", seq_id=spec.seq_id)
            self._flight_of[spec.seq_id] = flight
        flight.is_prefilling = self._workers.has_prefill and is_worth_it(
            self._now, self._request(flight), self._router, self._config
        )
        self._send(flight, effects)

    def _cancel(self, seq_id: SeqId, reason: FinishReason, effects: list[FrontEffect]) -> None:
        flight = self._flight_of.get(seq_id)
        if flight is None:
            return
        if (end := flight.cancel(seq_id, reason)) is not None:
            self._say(flight, [end], effects)
            self._hand_off_if_ready(flight, effects)
        elif flight.worker_id is not None:
            effects.append(Forward(flight.worker_id, Cancel(seq_id, reason)))

    def _end_all(self, reason: FinishReason, error: str, effects: list[FrontEffect]) -> None:
        for flight in list(self._flights.values()):
            if flight.worker_id is not None:
                effects += [Forward(flight.worker_id, Cancel(seq_id)) for seq_id in flight]
            self._say(flight, flight.end(reason, error), effects)

    # ---- workers

    def _hear(self, worker_id: WorkerId, word: Word, effects: list[FrontEffect]) -> None:
        flight = self._flight_of.get(word.seq_id)
        # Of one that has ended here, or is elsewhere, it says no more than that KV may be held.
        if flight is None or flight.worker_id != worker_id:
            if isinstance(word, Finish):
                effects.append(Forward(worker_id, EndLease(word.seq_id)))
            if flight is not None and flight.has_left(worker_id, word):
                self._send_if_waiting(flight, effects)  # it may be its worker again
            return
        if isinstance(word, Emit):
            before = flight.num_output_tokens
            if (said := flight.hear(word)) is not None:
                effects.append(said)
                self._follow(flight, before, effects)
            return
        if isinstance(word, Computed):
            self._stream(flight, word, effects)
        if isinstance(word, Admitted) and not flight.is_prefilling:
            self._end_lease(flight, word.seq_id, effects)
        said = flight.hear(word)
        self._hand_off_if_ready(flight, effects)
        if said is not None:
            if isinstance(said, Finish) and said.reason is FinishReason.ERROR:
                self._route(RouteFailed(flight.request_id, said.error), effects)
            self._say(flight, [said], effects)

    def _follow(self, flight: Flight, before: int, effects: list[FrontEffect]) -> None:
        """Let the router know how far it is, now and then."""
        after = flight.num_output_tokens
        if not before and after:
            self._route(RouteStarted(flight.request_id), effects)
        if before // PROGRESS_TOKENS != after // PROGRESS_TOKENS:
            self._route(RouteProgress(flight.request_id, after), effects)

    def _lose(self, event: WorkerDown, effects: list[FrontEffect]) -> None:
        """What ran there goes on elsewhere, as far as it may."""
        worker = self._workers.remove(event.worker_id)
        lost = [f for f in self._flights.values() if f.worker_id == event.worker_id]
        self._route(event, effects)  # first, so that nothing more is sent there
        for flight in (*self._legs.to(event.worker_id), *lost):
            self._drop_leg(flight, effects)
        for flight in lost:
            words = flight.lose_worker(event.reason, is_failure=event.is_failure)
            if flight.num_failures > self._config.max_migrations:
                error = f"worker {worker.name} was lost: {event.reason}"
                if self._config.max_migrations:
                    error += f" (the request has lost {flight.num_failures} workers)"
                words += flight.end(FinishReason.ERROR, error)
            self._say(flight, words, effects)
            if not flight.is_over:
                self.num_migrations += 1
                self._send(flight, effects)
        self._spare_prefill(effects)

    # ---- hand-off

    def _pass_by(self, effects: list[FrontEffect]) -> None:
        """What a worker that has stalled was to hand on, or was handed, goes elsewhere, if anybody
        can take it; and first, those who wait for a worker may not be sent there.
        """
        for flight in list(self._flights.values()):
            self._send_if_waiting(flight, effects)
        for worker_id in filter(self._workers.can_do_without, self._workers.stalled()):
            for flight in list(self._flights.values()):
                if flight.worker_id == worker_id and flight.is_handed_over:
                    self._recall(flight, worker_id, effects)

    def _recall(self, flight: Flight, worker_id: WorkerId, effects: list[FrontEffect]) -> None:
        """What it has computed and not told is lost, and what it tells late counts for nothing."""
        self.num_recalls += 1
        self._drop_leg(flight, effects)
        effects += [Forward(worker_id, word) for word in flight.farewell()]
        self._say(flight, flight.recall(), effects)
        self._send_if_waiting(flight, effects)

    def _spare_prefill(self, effects: list[FrontEffect]) -> None:
        """Where nobody computes prompts for others any more, those that wait for it do without."""
        if not self._workers.has_prefill:
            for flight in [one for one in self._flights.values() if one.is_prefilling]:
                self._send_if_waiting(flight, effects)

    def _turn_aside(self, worker_id: WorkerId, effects: list[FrontEffect]) -> None:
        """What was on its way there goes elsewhere when its prompt is computed."""
        for flight in self._legs.to(worker_id):
            self._drop_leg(flight, effects)

    def _stream(self, flight: Flight, word: Computed, effects: list[FrontEffect]) -> None:
        """Let KV be copied to where it will be needed while the rest of the prompt is computed;
        where whoever computes it may decode it, too, that is seen in the end.
        """
        if self._legs.find(flight) is None and not self._workers.may_decode(flight.worker_id):
            request_id = self._next_request_id
            self._next_request_id += 1
            self._legs.ask(request_id, flight, word.seq_id)
            self._route(RouteArrive(as_coming(self._request(flight), request_id)), effects)
            if self._legs.find(flight) is None:  # nobody has room now
                self._legs.withdraw(request_id)
                self._route(RouteDone(request_id), effects)
        leg = self._legs.find(flight)
        if leg is not None and leg.seq_id == word.seq_id:
            effects.append(Forward(leg.worker_id, word))

    def _drop_leg(self, flight: Flight, effects: list[FrontEffect]) -> None:
        leg = self._legs.take(flight)
        if leg is not None:
            self._route(RouteDone(leg.request_id), effects)
            if leg.worker_id in self._workers:
                effects.append(Forward(leg.worker_id, EndLease(leg.seq_id)))

    def _hand_off_if_ready(self, flight: Flight, effects: list[FrontEffect]) -> None:
        if not flight.is_prefilled or flight.is_over:
            return
        flight.leave_prefill()
        self.num_handoffs += 1
        leg = self._legs.find(flight)
        if leg is None or leg.seq_id not in flight or leg.worker_id in self._workers.shunned():
            self._drop_leg(flight, effects)
            self._send(flight, effects)
            return
        # From here on it is what the router knows as what was to come.
        self._legs.take(flight)
        del self._flights[flight.request_id]
        self._route(RouteDone(flight.request_id), effects)
        flight.request_id = self._numbers[flight.specs[0].request_id] = leg.request_id
        self._flights[leg.request_id] = flight
        effects.append(self._go(flight, leg.worker_id, None))

    def _end_lease(self, flight: Flight, seq_id: SeqId, effects: list[FrontEffect]) -> None:
        """Nobody needs what a prefill worker holds for it any more."""
        lender = flight.worker_id if flight.is_prefilling else flight.lender
        if lender is not None and lender in self._workers:
            effects.append(Forward(lender, EndLease(seq_id)))

    # ---- routing

    def _send(self, flight: Flight, effects: list[FrontEffect]) -> None:
        """Let the router find a worker for it: one that decodes, where none is for prompts."""
        flight.is_prefilling = flight.is_prefilling and self._workers.has_prefill
        request = self._request(flight)
        self._route(RouteArrive(as_prompt(request) if flight.is_prefilling else request), effects)

    def _send_if_waiting(self, flight: Flight, effects: list[FrontEffect]) -> None:
        if flight.worker_id is None and not flight.is_over:
            self._send(flight, effects)

    def _route(self, event: RouterEvent, effects: list[FrontEffect]) -> None:
        for effect in self._router.handle(self._now, event):
            match effect:
                case Dispatch():
                    self._dispatch(effect, effects)
                case RouteReject(request_id):
                    flight = self._flights.get(request_id)
                    if flight is not None:
                        self._say(flight, flight.refuse(effect), effects)
                case Resync() | CallAt():
                    effects.append(effect)
                case Queued():
                    pass
                case _:
                    assert_never(effect)

    def _dispatch(self, effect: Dispatch, effects: list[FrontEffect]) -> None:
        flight = self._flights.get(effect.request_id)
        if flight is not None:
            effects.append(self._go(flight, effect.worker_id, effect.decision))
            return
        flight, leg = self._legs.answer(effect.request_id, effect.worker_id)
        source = self._workers.address(flight.worker_id, leg.worker_id)
        effects.append(Forward(leg.worker_id, flight.coming(leg.seq_id, source)))

    def _go(self, flight: Flight, worker_id: WorkerId, decision: Decision | None) -> Forward:
        """It goes there, and its KV may be copied from whoever has it."""
        holder, num_blocks = flight.source(decision)
        source = "" if holder == worker_id else self._workers.address(holder, worker_id)
        return Forward(worker_id, Arrive(flight.begin(worker_id, source, num_blocks)))

    def _request(self, flight: Flight) -> RouteRequest:
        weight = self._config.handoff_neighbour_weight if self._workers.has_prefill else 0.0
        return flight.as_request(self._workers.spec, weight, self._workers.shunned())

    def _say(self, flight: Flight, words: Sequence[Said], effects: list[FrontEffect]) -> None:
        effects += words
        for word in words:
            if isinstance(word, Finish | Reject):
                del self._flight_of[word.seq_id]
                self._end_lease(flight, word.seq_id, effects)
        if flight.is_over and self._flights.pop(flight.request_id, None) is not None:
            self._drop_leg(flight, effects)
            self._route(RouteDone(flight.request_id), effects)
