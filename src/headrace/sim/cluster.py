"""A cluster under one virtual clock: a RouterCore, the EngineCores of its workers, the requests
that come, and faults.

Decides when a message arrives and which faults happen; refuses to hold a second copy of any policy.
It plays the front end's part as far as routing needs it: a request goes where Dispatch says, and
again elsewhere, with the output that it has, when its worker dies.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    CallAt,
    Emit,
    Finish,
    Reject,
    Timer,
)
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import NS_PER_MS, Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.schema import RouterConfig, WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.kv.names import BlockChain, root_name
from headrace.core.router.core import RouterCore
from headrace.core.router.decision import Decision
from headrace.core.router.events import (
    Dispatch,
    Resync,
    RouteArrive,
    RouteDone,
    RouteProgress,
    RouterEffect,
    RouteReject,
    RouteRequest,
    RouterEvent,
    RouteStarted,
    WorkerDown,
    WorkerUp,
)
from headrace.core.router.stats import RouterStats
from headrace.sim.cluster_worker import MessageFaults, SimWorker, SimWorkerSetup
from headrace.sim.runtime import SimRuntime

MAX_CALLS = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    num_workers: int
    router: RouterConfig
    worker: WorkerConfig
    spec: WorkerSpec
    cost: FittedCostModel  # how long steps take
    believed: FittedCostModel | None = None  # what workers and router believe; None = the same
    arrivals: Sequence[tuple[Ns, SeqSpec]]
    publishes_kv: bool = True
    stats_period_ms: float = 100.0
    message_ms: float = 0.2  # from router to worker, and back
    faults: MessageFaults = field(default_factory=MessageFaults)
    # Worker index, time it dies, time it is back under the same name (None = never).
    deaths: tuple[tuple[int, Ns, Ns | None], ...] = ()
    seed: int = 0
    is_checked: bool = False  # cores check their laws after every event, at a cost


@dataclass(slots=True, kw_only=True)
class RequestFate:
    """What its client saw. Times are nanoseconds of the virtual clock."""

    spec: SeqSpec
    tokens: list[int] = field(default_factory=list)
    token_ns: list[Ns] = field(default_factory=list)
    end: Finish | RouteReject | Reject | None = None
    num_cached_tokens: int = 0  # found by its worker; by the last one after a death
    worker_ids: list[WorkerId] = field(default_factory=list)
    decision: Decision | None = None

    @property
    def ttft_ms(self) -> float:
        return (self.token_ns[0] - self.spec.arrived_ns) / NS_PER_MS

    @property
    def tpot_ms(self) -> float:
        return (self.token_ns[-1] - self.token_ns[0]) / max(1, len(self.tokens) - 1) / NS_PER_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """`trace_hash` is the hex SHA-256 over the router's every (now, event, effects), in order."""

    trace_hash: str
    num_events: int
    end_ns: Ns
    fates: dict[SeqId, RequestFate]
    router: RouterStats


def simulate_cluster(cluster: Cluster) -> ClusterReport:
    """Run a cluster until every request has ended.

    Raises InvariantError when a law of a core breaks or a request does not end exactly once.
    """
    return _Front(cluster).run()


class _Front:
    """The front end, with the network between it and its workers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.runtime = SimRuntime()
        self.rng = Random(cluster.seed)
        self.believed = cluster.believed or cluster.cost
        self._setup = SimWorkerSetup(
            config=cluster.worker,
            spec=cluster.spec,
            cost=cluster.cost,
            believed=self.believed,
            stats_period_ms=cluster.stats_period_ms,
            faults=cluster.faults,
            seed=cluster.seed,
            is_checked=cluster.is_checked,
        )
        self._router = RouterCore(cluster.router)
        self._digest = hashlib.sha256()
        self._num_events = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._workers: dict[WorkerId, SimWorker] = {}
        self._places: list[WorkerId | None] = [None] * cluster.num_workers
        self._fates: dict[SeqId, RequestFate] = {}
        self._num_alive = len(cluster.arrivals)
        self._num_started = 0  # workers, ever
        for place in range(cluster.num_workers):
            self._start_worker(place)
        for place, dies_ns, back_ns in cluster.deaths:
            self.runtime.call_at(dies_ns, partial(self._kill, place))
            if back_ns is not None:
                self.runtime.call_at(back_ns, partial(self._start_worker, place))
        for at_ns, spec in cluster.arrivals:
            self.runtime.call_at(at_ns, partial(self._arrive, spec))

    @property
    def is_over(self) -> bool:
        return self._num_alive == 0

    def run(self) -> ClusterReport:
        self.runtime.run(max_calls=MAX_CALLS)
        self._router.check()
        lost = [seq_id for seq_id, fate in self._fates.items() if fate.end is None]
        if lost or self._router.stats().num_in_flight or self._router.stats().num_waiting:
            raise InvariantError("requests never ended", seq_ids=lost[:8])
        for worker in self._workers.values():
            worker.close()
        return ClusterReport(
            trace_hash=self._digest.hexdigest(),
            num_events=self._num_events,
            end_ns=self.runtime.now,
            fates=self._fates,
            router=self._router.stats(),
        )

    # ---- the router

    def tell(self, event: RouterEvent) -> None:
        now = self.runtime.now
        effects = self._router.handle(now, event)
        self._digest.update(self._encoder.encode((now, event, effects)))
        self._num_events += 1
        if self.cluster.is_checked:
            self._router.check()
        for effect in effects:
            self._carry_out(effect)

    def later(self, call: Callable[[], None]) -> None:
        """After the time of a message."""
        self.runtime.call_later(Ns(round(self.cluster.message_ms * NS_PER_MS)), call)

    def _carry_out(self, effect: RouterEffect) -> None:
        match effect:
            case Dispatch(request_id, worker_id, decision):
                fate = self._fates[SeqId(request_id)]
                fate.worker_ids.append(worker_id)
                fate.decision = decision
                spec = msgspec.structs.replace(fate.spec, output_tokens=tuple(fate.tokens))
                self.later(partial(self._workers[worker_id].receive, spec))
            case RouteReject(request_id):
                self._end(SeqId(request_id), effect)
            case Resync(worker_id):
                self.later(self._workers[worker_id].send_snapshot)
            case CallAt(at_ns, timer_id):
                self.runtime.call_at(at_ns, partial(self._ring, Timer(timer_id)))
            case _:
                pass  # Queued: the router keeps it

    def _ring(self, timer: Timer) -> None:
        if not self.is_over:
            self.tell(timer)

    def _arrive(self, spec: SeqSpec) -> None:
        self._fates[spec.seq_id] = RequestFate(spec=spec)
        self.tell(RouteArrive(self._request(spec, ())))

    def _request(self, spec: SeqSpec, excluded: tuple[WorkerId, ...]) -> RouteRequest:
        fate, worker = self._fates[spec.seq_id], self.cluster.spec
        tokens = [*spec.prompt_tokens, *fate.tokens]
        root = root_name(
            worker.model_digest, worker.kv_dtype, worker.block_size, spec.adapter, spec.salt
        )
        chain = BlockChain(root, worker.block_size)
        chain.extend(tokens)
        return RouteRequest(
            request_id=spec.seq_id,
            block_names=tuple(chain.names),
            num_tokens=len(tokens),
            max_tokens=spec.params.max_tokens - len(fate.tokens),
            priority=spec.priority,
            slo=spec.slo,
            session=spec.request_id,
            tenant=spec.salt,
            arrived_ns=spec.arrived_ns,
            deadline_ns=spec.deadline_ns,
            excluded=excluded,
            is_migration=bool(excluded),
        )

    # ---- what workers say

    def emitted(self, worker_id: WorkerId, emit: Emit) -> None:
        fate = self._fates[emit.seq_id]
        if fate.end is not None or fate.worker_ids[-1] != worker_id:
            return  # it went on elsewhere
        is_first = not fate.tokens or len(fate.worker_ids) > 1
        fate.tokens += emit.tokens
        fate.token_ns += [self.runtime.now] * len(emit.tokens)
        if is_first:
            self.tell(RouteStarted(emit.seq_id))  # again and again after a death: idempotent
        elif len(fate.tokens) % 16 == 0:
            self.tell(RouteProgress(emit.seq_id, len(fate.tokens)))

    def ended(self, worker_id: WorkerId, end: Finish | Reject) -> None:
        fate = self._fates[end.seq_id]
        if fate.end is None and fate.worker_ids[-1] == worker_id:
            if isinstance(end, Finish):
                fate.num_cached_tokens = end.num_cached_tokens
            self._end(end.seq_id, end)
            self.tell(RouteDone(end.seq_id))

    def _end(self, seq_id: SeqId, end: Finish | RouteReject | Reject) -> None:
        fate = self._fates[seq_id]
        if fate.end is not None:
            raise InvariantError("request ended twice", seq_id=seq_id)
        fate.end = end
        self._num_alive -= 1

    # ---- workers come and go

    def _start_worker(self, place: int) -> None:
        if self.is_over and self._num_started:
            return
        worker_id = WorkerId(self._num_started)
        self._num_started += 1
        self._places[place] = worker_id
        self._workers[worker_id] = worker = SimWorker(self, worker_id, self._setup)
        scheduler = self.cluster.worker.scheduler
        self.tell(
            WorkerUp(
                worker_id=worker_id,
                name=f"worker-{place}",
                spec=self.cluster.spec,
                role=Role.MIXED,
                step_tokens=scheduler.step_tokens,
                max_running_seqs=scheduler.max_running_seqs,
                cost=self.believed,
                publishes_kv=self.cluster.publishes_kv,
            )
        )
        worker.tell_load()

    def _kill(self, place: int) -> None:
        worker_id = self._places[place]
        if worker_id is None or self.is_over:
            return
        self._places[place] = None
        self._workers.pop(worker_id).is_dead = True
        self.tell(WorkerDown(worker_id, "killed"))
        for fate in list(self._fates.values()):
            if fate.end is None and fate.worker_ids[-1:] == [worker_id]:
                self.tell(RouteArrive(self._request(fate.spec, tuple(fate.worker_ids))))
