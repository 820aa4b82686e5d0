"""FrontCore: the machine that makes one engine of many workers. Events in, effects out.

What arrives and what comes of it looks as with an EngineCore; between the two, requests are
forwarded to workers. It owns the requests' lives over all the workers that they may meet: a request
whose worker is lost goes on elsewhere, from the last token that its reader has. Which worker is
RouterCore's choice.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias, assert_never

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    Admitted,
    Arrive,
    CallAt,
    Cancel,
    Emit,
    EndLease,
    Finish,
    Preempted,
    Reject,
    Timer,
)
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import NS_PER_MS, Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.kv.names import BlockChain, root_name
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
    WorkersStarting,
    WorkerStats,
    WorkerUp,
)
from headrace.core.router.flight import Flight, Word

PROGRESS_TOKENS: Final = 16  # output after which the router hears of it again


class WorkerSaid(msgspec.Struct, frozen=True, tag=True):
    """What one event of a worker's engine has to say to readers."""

    worker_id: WorkerId
    words: tuple[Word, ...]


class EndAll(msgspec.Struct, frozen=True, tag=True):
    """The last word to everybody, whatever the workers still do."""

    reason: FinishReason
    error: str = ""


class Forward(msgspec.Struct, frozen=True, tag=True):
    """For a worker's engine."""

    worker_id: WorkerId
    event: Arrive | Cancel | EndLease


FrontEvent: TypeAlias = (
    Arrive
    | Cancel
    | EndAll
    | WorkerUp
    | WorkerSaid
    | WorkerStats
    | WorkerKv
    | WorkerKvSnapshot
    | WorkerDrain
    | WorkersStarting
    | WorkerDown
    | Timer
)
FrontEffect: TypeAlias = Admitted | Emit | Preempted | Finish | Reject | Forward | Resync | CallAt


class FrontCore:
    """`handle(now, event) -> effects`. An Arrive holds the sequences of one request.

    A request may lose `max_migrations` workers; with the next one it ends with an error. Workers
    that were asked to leave do not count.

    Where there are workers for prefill, one of them may compute its prompt and first token;
    another then copies the KV and goes on. If anything of that fails, the rest is computed there.
    """

    def __init__(self, router: RouterCore, config: ClusterConfig) -> None:
        self._router = router
        self._config = config
        self._now = Ns(0)
        self._flights: dict[int, Flight] = {}
        self._flight_of: dict[SeqId, Flight] = {}
        self._workers: dict[WorkerId, WorkerUp] = {}
        self._next_request_id = 0
        self._numbers: dict[str, int] = {}  # of the last requests, by their ids
        self.num_migrations = 0  # requests that went on elsewhere because their worker was lost
        self.num_handoffs = 0  # requests whose prompt was computed by another worker

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
        """Prefill that is due at this worker, as the router has booked it."""
        return self._router.due_ns(now, worker_id)

    def waiting_for(self) -> list[Role]:
        """What each request that waits for a worker asks of it."""
        return [
            Role.PREFILL if flight.is_prefilling else Role.MIXED
            for flight in self._flights.values()
            if flight.worker_id is None
        ]

    def decision(self, request_id: str) -> Decision | None:
        """Why a request went where it is, or was, last; None where that is forgotten."""
        number = self._numbers.get(request_id)
        return None if number is None else self._router.decision(number)

    def check(self) -> None:
        """Raise InvariantError unless every sequence that lives is under way, once."""
        self._router.check()
        for flight in self._flights.values():
            for seq_id in flight:
                if self._flight_of.get(seq_id) is not flight:
                    raise InvariantError("a request has lost a sequence", seq_id=seq_id)
        num_seqs = sum(len(flight) for flight in self._flights.values())
        if num_seqs != len(self._flight_of) or any(f.is_over for f in self._flights.values()):
            raise InvariantError(
                "sequences do not add up", of_requests=num_seqs, living=len(self._flight_of)
            )

    # ---- the machine

    def handle(self, now: Ns, event: FrontEvent) -> list[FrontEffect]:
        if now < self._now:
            raise InvariantError("time went back", last=self._now, now=now)
        self._now = now
        effects: list[FrontEffect] = []
        match event:
            case WorkerStats() | WorkerKv() | WorkerKvSnapshot() | Timer():
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
                self._workers[event.worker_id] = event
                self._route(event, effects)
            case WorkerDrain() | WorkersStarting():
                self._route(event, effects)
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
        flight.is_prefilling = self._is_worth_handing_off(flight)
        self._send(flight, effects)

    def _cancel(self, seq_id: SeqId, reason: FinishReason, effects: list[FrontEffect]) -> None:
        flight = self._flight_of.get(seq_id)
        if flight is None:
            return
        end = flight.cancel(seq_id, reason)
        if end is not None:
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
        # A word about a sequence that has ended here, or is elsewhere, means nothing any more.
        if flight is None or flight.worker_id != worker_id:
            return
        before = flight.num_output_tokens
        if isinstance(word, Admitted) and not flight.is_prefilling:
            self._end_lease(flight, word.seq_id, effects)
        said = flight.hear(word)
        self._hand_off_if_ready(flight, effects)
        if said is None:
            return
        if isinstance(said, Emit):
            effects.append(said)
            self._follow(flight, before, effects)
        else:
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
        worker = self._workers.pop(event.worker_id)
        lost = [f for f in self._flights.values() if f.worker_id == event.worker_id]
        self._route(event, effects)
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
                flight.is_prefilling = flight.is_prefilling and self._has(Role.PREFILL)
                self._send(flight, effects)

    # ---- hand-off

    def _has(self, role: Role) -> bool:
        return any(worker.role is role for worker in self._workers.values())

    def _is_worth_handing_off(self, flight: Flight) -> bool:
        """Whether a prefill worker should compute the prompt: it costs the decoding ones nothing
        there, and the way from there something.
        """
        if self._config.handoff == "never" or not self._has(Role.PREFILL):
            return False
        if not (self._has(Role.DECODE) or self._has(Role.MIXED)):
            return False  # who is refused in the end should not have heard a first token
        request = self._request(flight)
        if request.max_tokens < 2:
            return False  # nothing would be left to do elsewhere
        there = self._quote_ns(request, role=Role.PREFILL, max_tokens=1)
        here = self._quote_ns(request, role=Role.MIXED)
        if there is None or here is None or self._config.handoff == "always":
            return there is not None
        rest = self._quote_ns(request, role=Role.MIXED, num_tokens=1, block_names=())
        way_ns = self._config.handoff_ms * NS_PER_MS
        return rest is not None and there + way_ns + rest < here

    def _quote_ns(self, request: RouteRequest, **changes: object) -> float | None:
        return self._router.quote_ns(self._now, msgspec.structs.replace(request, **changes))

    def _hand_off_if_ready(self, flight: Flight, effects: list[FrontEffect]) -> None:
        if flight.is_prefilled and not flight.is_over:
            flight.leave_prefill()
            self.num_handoffs += 1
            self._send(flight, effects)

    def _end_lease(self, flight: Flight, seq_id: SeqId, effects: list[FrontEffect]) -> None:
        """Nobody needs what a prefill worker holds for it any more."""
        lender = flight.worker_id if flight.is_prefilling else flight.lender
        if lender in self._workers:
            effects.append(Forward(lender, EndLease(seq_id)))

    # ---- routing

    def _send(self, flight: Flight, effects: list[FrontEffect]) -> None:
        """Let the router find a worker for it."""
        self._route(RouteArrive(self._request(flight)), effects)

    def _route(self, event: RouterEvent, effects: list[FrontEffect]) -> None:
        for effect in self._router.handle(self._now, event):
            match effect:
                case Dispatch(request_id, worker_id, decision):
                    flight = self._flights[request_id]
                    specs = flight.begin(worker_id, self._kv_source(flight, decision))
                    effects.append(Forward(worker_id, Arrive(specs)))
                case RouteReject(request_id):
                    flight = self._flights[request_id]
                    self._say(flight, flight.refuse(effect), effects)
                case Resync() | CallAt():
                    effects.append(effect)
                case Queued():
                    pass
                case _:
                    assert_never(effect)

    def _kv_source(self, flight: Flight, decision: Decision) -> str:
        """Where its KV may be copied from: its own prefill worker, or whoever has a prefix of it
        cached.
        """
        holder = decision.chosen.fetch_from if flight.lender is None else flight.lender
        worker = None if holder is None else self._workers.get(holder)
        return "" if worker is None else worker.kv_address

    def _request(self, flight: Flight) -> RouteRequest:
        """As the router sees it: what is known of it, and what is still to come."""
        spec = flight.specs[0]
        tokens = flight.known_tokens()
        return RouteRequest(
            request_id=flight.request_id,
            block_names=self._names(spec, tokens),
            num_tokens=len(tokens),
            num_choices=len(flight),
            max_tokens=len(spec.prompt_tokens) + spec.params.max_tokens - len(tokens),
            priority=spec.priority,
            slo=spec.slo,
            tenant=spec.salt,
            adapter=spec.adapter,
            arrived_ns=spec.arrived_ns,
            deadline_ns=spec.deadline_ns,
            excluded=flight.excluded,
            is_migration=flight.num_migrations > 0 or flight.lender is not None,
            role=Role.PREFILL if flight.is_prefilling else Role.MIXED,
        )

    def _names(self, spec: SeqSpec, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """Of the full blocks, as any worker names them; they all serve the same model."""
        worker = next(iter(self._workers.values()), None)
        if worker is None:
            return ()
        of = worker.spec
        root = root_name(of.model_digest, of.kv_dtype, of.block_size, spec.adapter, spec.salt)
        chain = BlockChain.of(root, of.block_size, spec.prompt_tokens)
        chain.extend(tokens)
        return tuple(chain.names)

    # ---- words

    def _say(self, flight: Flight, words: Sequence[Word], effects: list[FrontEffect]) -> None:
        effects += words
        for word in words:
            if isinstance(word, Finish | Reject):
                del self._flight_of[word.seq_id]
                self._end_lease(flight, word.seq_id, effects)
        if flight.is_over and self._flights.pop(flight.request_id, None) is not None:
            self._route(RouteDone(flight.request_id), effects)
