"""The workers that are up, and which of them could take a request at all.

Decides whom a request may not go to, and says why; refuses to know who is best.
"""

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.schema import RouterConfig
from headrace.core.router.breaker import Breaker
from headrace.core.router.events import RouteRequest, WorkerStats, WorkerUp
from headrace.core.router.feed import KvFeed
from headrace.core.router.predict import Predictor
from headrace.core.router.ring import Ring
from headrace.core.router.worker import Worker

# What a worker of each role can be asked for.
TAKES: Final = {
    Role.MIXED: (Role.MIXED, Role.DECODE),  # a whole request: decode workers can prefill too
    Role.PREFILL: (Role.PREFILL, Role.MIXED),
    Role.DECODE: (Role.DECODE, Role.MIXED),
}
Reasons = dict[str, list[str]]  # names of workers by why they cannot
PRIOR: Final = Predictor(None, step_tokens=512, block_size=16, block_bytes=0)

# Of filters that no time will lift while the same workers are up.
MODEL, ADAPTER, ROLE = "other model", "adapter not loaded", "other role"
TOO_LONG = "context or kv pool too small"
NO_ROOM = "no room"


class Survey:
    """What a request finds."""

    __slots__ = ("filtered", "full", "is_fallback", "usable")

    def __init__(
        self,
        usable: list[Worker],
        filtered: Reasons,
        full: list[Worker],
        *,
        is_fallback: bool = False,
    ) -> None:
        self.usable = usable
        self.filtered = filtered
        self.full = full  # they could take it later
        self.is_fallback = is_fallback  # only doubtful workers could take it: doubts did not count

    @property
    def is_lonely(self) -> bool:
        """Nobody is there who could take it, now or later."""
        return not self.usable and not self.full

    @property
    def waits_for(self) -> str:
        return "nobody is there who could take it" if self.is_lonely else NO_ROOM


class LateLoads(Protocol):
    """What workers have said of their loads and nobody has told, with the moment at which it would
    have been told: for whoever counts a load only where something depends on it. A worker's last
    word is enough where the router has heard of nothing else there since the one before, while no
    request waits for room, and where words do not say what steps take.
    """

    def take(self, worker_id: WorkerId) -> tuple[Ns, WorkerStats] | None: ...

    def take_all(self) -> Iterable[tuple[Ns, WorkerStats]]: ...


class Fleet:
    def __init__(self, config: RouterConfig, late_loads: LateLoads | None = None) -> None:
        self._config = config
        self._late_loads = late_loads
        self._stale_ns = round(config.stats_stale_ms * NS_PER_MS)
        self._workers: dict[WorkerId, Worker] = {}
        self._by_bit: dict[int, Worker] = {}
        self._predictors: set[Predictor] = set()
        self._breakers: dict[str, Breaker] = {}
        self._fitting: dict[tuple[Role, str, str], tuple[list[Worker], Reasons]] = {}
        self._ring: Ring | None = None

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def find(self, worker_id: WorkerId) -> Worker | None:
        return self._workers.get(worker_id)

    def with_bit(self, bit: int) -> Worker:
        return self._by_bit[bit]

    @property
    def predictors(self) -> set[Predictor]:
        """One for each kind of worker."""
        return self._predictors

    @property
    def any_predictor(self) -> Predictor:
        """Of some worker, or a guess."""
        return next((worker.predictor for worker in self), PRIOR)

    @property
    def ring(self) -> Ring:
        if self._ring is None:
            self._ring = Ring(worker.name for worker in self._workers.values())
        return self._ring

    # ---- changes

    def add(self, now: Ns, up: WorkerUp, bit: int) -> Worker:
        if up.worker_id in self._workers:
            raise InvariantError("worker id used twice", worker_id=up.worker_id)
        self._forget_breakers(now)
        breaker = self._breakers.setdefault(up.name, Breaker(self._config))
        worker = Worker(up, bit, self._predictor_of(up), breaker, KvFeed())
        self._workers[up.worker_id] = self._by_bit[bit] = worker
        self._note_predictors()
        self._forget_answers()
        return worker

    def _predictor_of(self, up: WorkerUp) -> Predictor:
        """Where others compute on the same, the quickest of all counts for each of them: a worker
        that was measured while others started seems slower than it is, and it would be passed over
        for one that is busy.
        """
        found = Predictor.of(up)
        found = next((one for one in self._predictors if one.is_like(found)), found)
        others = [other for other in self._workers.values() if _is_as_fast(other.up, up)]
        others = [other for other in others if other.predictor.has_same_steps(found)]
        for other in others:
            found = min(other.predictor, found, key=lambda one: one.full_step_ns)
        for other in others:
            other.predict_by(found)
        return found

    def learn(self, worker: Worker) -> None:
        """Its steps take something else than it said before. The quickest of those that are alike
        still counts for each of them, by what each says now; so one that was measured too low does
        until it has computed.
        """
        _believe([worker, *self._others_like(worker)])
        self._note_predictors()

    def _others_like(self, worker: Worker) -> list[Worker]:
        own = worker.own_predictor
        return [
            other
            for other in self._workers.values()
            if other is not worker
            and _is_as_fast(other.up, worker.up)
            and other.own_predictor.has_same_steps(own)
        ]

    def remove(self, worker: Worker) -> None:
        """What it was measured to take counts on as long as its like have not computed."""
        del self._workers[worker.worker_id]
        del self._by_bit[worker.bit]
        others = self._others_like(worker)
        if any(other.has_told for other in others):
            _believe(others)
        self._note_predictors()
        self._forget_answers()

    def _note_predictors(self) -> None:
        self._predictors = {worker.predictor for worker in self._workers.values()}

    def drain(self, worker: Worker) -> None:
        worker.is_draining = True
        self._forget_answers()

    def set_role(self, worker: Worker, role: Role) -> None:
        worker.up = msgspec.structs.replace(worker.up, role=role)
        self._forget_answers()

    def hear(self, now: Ns, told: WorkerStats) -> None:
        worker = self._workers.get(told.worker_id)
        if worker is None:
            return
        is_sound = worker.reconcile(now, told.stats, told.num_received, self._stale_ns)
        if is_sound and worker.tells(told.stats):
            self.learn(worker)

    def current(self, worker: Worker) -> Worker:
        """The worker, whose last word on its load is taken."""
        if self._late_loads is not None:
            late = self._late_loads.take(worker.worker_id)
            if late is not None:
                self.hear(*late)
        return worker

    def move(self, worker: Worker, bit: int) -> None:
        """Give a worker another place in the index."""
        del self._by_bit[worker.bit]
        worker.bit = bit
        self._by_bit[bit] = worker

    def _forget_answers(self) -> None:
        self._fitting.clear()
        self._ring = None

    def _forget_breakers(self, now: Ns) -> None:
        names = {worker.name for worker in self._workers.values()}
        for name in [name for name in self._breakers if name not in names]:
            if self._breakers[name].is_forgettable(now):
                del self._breakers[name]

    # ---- queries

    def due_ns(self, now: Ns, worker_id: WorkerId) -> int:
        """Prefill that is due at this worker, in ns; 0 where it is not up."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else self.current(worker).due_ns(now)

    def survey(self, now: Ns, request: RouteRequest) -> Survey:
        """Who could take the request now, by what all have said of their loads."""
        for late in self._late_loads.take_all() if self._late_loads is not None else ():
            self.hear(*late)
        fitting, misfits = self._find_fitting(request)
        filtered = {reason: list(names) for reason, names in misfits.items()}
        asks = _Asks(now, request, self._config)
        usable = asks.find_usable(fitting)
        if len(usable) == len(fitting):
            return Survey(usable, filtered, [])
        known = set(usable)
        full: list[Worker] = []
        doubtful: list[Worker] = []
        doubtful_and_full: list[Worker] = []
        for worker in fitting:
            if worker in known:
                continue
            has_room = asks.finds_room(worker)
            if reason := asks.find_fault(worker):
                pass
            elif reason := asks.find_doubt(worker):
                (doubtful if has_room else doubtful_and_full).append(worker)
            else:
                reason = NO_ROOM
                full.append(worker)
            filtered.setdefault(reason, []).append(worker.name)
        if usable or full:
            return Survey(usable, filtered, full)
        return Survey(doubtful, filtered, doubtful_and_full, is_fallback=True)

    def _find_fitting(self, request: RouteRequest) -> tuple[list[Worker], Reasons]:
        """Those of the right kind: the same answer until a worker comes, goes, drains or has
        another role."""
        key = request.role, request.model_digest, request.adapter
        found = self._fitting.get(key)
        if found is None:
            fitting: list[Worker] = []
            filtered: Reasons = {}
            for worker in self._workers.values():
                reason = _find_misfit(worker, request)
                if reason:
                    filtered.setdefault(reason, []).append(worker.name)
                else:
                    fitting.append(worker)
            found = self._fitting[key] = fitting, filtered
        return found


class _Asks:
    """What a request needs of a worker at one time."""

    def __init__(self, now: Ns, request: RouteRequest, config: RouterConfig) -> None:
        num_output = min(request.max_tokens, config.expected_output_tokens)
        self.now = now
        self.excluded = request.excluded
        self.num_seqs = request.num_choices
        self.num_tokens = request.num_tokens + num_output * request.num_choices  # as expected
        self.most_tokens = request.num_tokens + request.max_tokens
        self.busy_until_ns = now + round(config.worker_queue_ms * NS_PER_MS)  # at the latest

    def find_usable(self, workers: list[Worker]) -> list[Worker]:
        """Those against which nothing speaks.

        A large fleet spends much of a decision here, so this calls nothing for a worker that is as
        workers should be; of the others, the methods below say why.
        """
        now, seqs, tokens = self.now, self.num_seqs, self.num_tokens
        most_tokens, busy_until_ns = self.most_tokens, self.busy_until_ns
        usable = [
            worker
            for worker in workers
            if worker.busy_until_ns <= busy_until_ns
            and worker.fresh_until_ns >= now
            and worker.seqs_left >= seqs
            and worker.tokens_left >= tokens
            and worker.most_tokens >= most_tokens
            and (worker.breaker.is_closed or worker.breaker.allows(now))
        ]
        if self.excluded:
            return [worker for worker in usable if worker.worker_id not in self.excluded]
        return usable

    def find_fault(self, worker: Worker) -> str:
        if worker.most_tokens < self.most_tokens:
            return TOO_LONG
        return "died on it, or stopped" if worker.worker_id in self.excluded else ""

    def find_doubt(self, worker: Worker) -> str:
        """Why to wait for nothing that this worker says or does."""
        if worker.fresh_until_ns < self.now:
            return "silent about its load"
        is_trusted = worker.breaker.is_closed or worker.breaker.allows(self.now)
        return "" if is_trusted else "cut off after failures"

    def finds_room(self, worker: Worker) -> bool:
        return (
            worker.seqs_left >= self.num_seqs
            and worker.tokens_left >= self.num_tokens
            and worker.due_ns(self.now) <= self.busy_until_ns - self.now
        )


def _is_as_fast(one: WorkerUp, other: WorkerUp) -> bool:
    """As far as is known: the same model on the same machine."""
    return bool(one.machine) and (one.machine, one.spec.model_digest, one.spec.kv_dtype) == (
        other.machine,
        other.spec.model_digest,
        other.spec.kv_dtype,
    )


def _believe(alike: list[Worker]) -> None:
    """Let the quickest of these count for each of them, by what each says."""
    quickest = min(alike, key=lambda one: one.full_step_ns)
    factor = quickest.full_step_ns / quickest.own_predictor.full_step_ns
    predictor = quickest.own_predictor.slower(factor)
    for other in alike:
        other.predict_by(predictor)


def _find_misfit(worker: Worker, request: RouteRequest) -> str:
    up = worker.up
    if up.role not in TAKES[request.role]:
        return ROLE
    if request.model_digest and up.spec.model_digest != request.model_digest:
        return MODEL
    if request.adapter and request.adapter not in up.adapters:
        return ADAPTER
    return "draining" if worker.is_draining else ""
