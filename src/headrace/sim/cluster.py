"""A cluster under one virtual clock: a FrontCore with its RouterCore, the EngineCores of its
workers, the network between them, the requests that come, and faults.

Decides when a message arrives and which faults happen; refuses to hold a second copy of any policy.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import Arrive, CallAt, Emit, EngineEffect, Finish, Reject, Timer
from headrace.core.base.plan import StepPlan
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, SeqId, WorkerId
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig
from headrace.core.cost.calibration import Host
from headrace.core.cost.fitted import Link
from headrace.core.router.core import RouterCore
from headrace.core.router.events import Resync, WorkerKv
from headrace.core.router.front import FrontCore
from headrace.core.router.front_events import Forward, FrontEffect, FrontEvent
from headrace.core.router.stats import RouterStats
from headrace.core.telemetry import ClusterTelemetry, RequestRecord
from headrace.core.telemetry.runs import emit_run
from headrace.core.workload.source import Source
from headrace.sim.client import NO_HOST, read_by_client
from headrace.sim.cluster_worker import SimWorker
from headrace.sim.engine import NO_TIMES, TokenTimes
from headrace.sim.loads import LoadReport, UnheardLoads
from headrace.sim.network import Network
from headrace.sim.places import Machines, Places, WorkerUse
from headrace.sim.pool import Habits, MessageFaults, Pool
from headrace.sim.runtime import SimRuntime, rare_collections
from headrace.sim.scaling import Autoscale, Scaling, ScalingReport
from headrace.sim.steps import Written

MAX_CALLS = 1_000_000_000
KV_LINK = Link(latency_ns=10_000.0, byte_ns=0.02)  # 50 GB/s
NO_LIMITS = Slo()
ENDS_OF_ANSWERS = (FinishReason.LENGTH, FinishReason.STOP)
NOTHING = Arrive(())  # stands for the event where a worker speaks

Death = tuple[int, Ns, Ns | None]
"""Index of a worker, when it dies, when it is back under the same name (None = never)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    pools: Sequence[Pool]
    source: Source
    router: RouterConfig = field(default_factory=RouterConfig)
    front: ClusterConfig = field(default_factory=ClusterConfig)
    link: Link = KV_LINK  # of each worker, for KV
    default_slo: Slo = NO_LIMITS  # limits of requests that state none
    stats_period_ms: float = 100.0
    message_ms: float = 0.2  # from front end to worker, and back
    faults: MessageFaults = field(default_factory=MessageFaults)
    deaths: tuple[Death, ...] = ()  # of the places that there are at the begin
    autoscale: Autoscale | None = None  # `default_slo` are the limits that it keeps
    host: Host = NO_HOST  # what passes outside of workers
    sharing: int = 1  # workers, in the order of their places, that share the cores of a machine
    slow_down: tuple[float, ...] = ()  # by how many of them are in a step; none = not at all
    slow_down_large: tuple[float, ...] = ()  # of large steps; none = the same
    seed: int = 0
    written: Written | None = None  # what sequences answer; None = anything
    glides: bool = True  # steps that are alike are taken at once; the decisions are the same
    is_checked: bool = False  # cores check their laws after every event, at a cost


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """`trace_hash` is the hex SHA-256 over what was sent where when, and over all ends."""

    trace_hash: str
    num_events: int  # of the front end
    end_ns: Ns
    records: list[RequestRecord]  # in the order of their ends; none where somebody else took them
    refused_ns: tuple[Ns, ...]  # when those came that were refused, who have no record
    num_migrations: int
    num_handoffs: int
    router: RouterStats
    workers: list[WorkerUse]
    scaling: ScalingReport | None = None  # where there was an autoscaler


Observer = Callable[[Ns, FrontEvent, Sequence[FrontEffect]], None]
"""Sees every event of the front end with its effects, in order."""
PlanObserver = Callable[[Ns, WorkerId, StepPlan], None]
"""Sees every step that a worker plans."""


def simulate_cluster(
    cluster: Cluster,
    *,
    on_record: Callable[[RequestRecord], None] | None = None,
    observe: Observer | None = None,
    observe_plan: PlanObserver | None = None,
) -> ClusterReport:
    """Run a cluster until every request has ended. `on_record` takes the records, so that they need
    not all be kept.

    Raises InvariantError when a law of a core breaks or a request does not end exactly once.
    """
    with rare_collections():
        return _World(cluster, on_record, observe, observe_plan).run()


def random_deaths(
    num_workers: int, *, mean_life_s: float, start_up_s: float, until_s: float, seed: int
) -> tuple[Death, ...]:
    """Each worker dies after lives of random length (exponential), and is back when it has started
    again.
    """
    deaths: list[Death] = []
    for place in range(num_workers):
        rng, now_s = Random(f"{seed}/{place}"), 0.0
        while (now_s := now_s + rng.expovariate(1.0 / mean_life_s)) < until_s:
            dies_ns, now_s = Ns(round(now_s * NS_PER_S)), now_s + start_up_s
            deaths.append((place, dies_ns, Ns(round(now_s * NS_PER_S))))
    return tuple(deaths)


class _World:
    """The virtual driver of a FrontCore, and all that is around it."""

    def __init__(
        self,
        cluster: Cluster,
        on_record: Callable[[RequestRecord], None] | None,
        observe: Observer | None,
        observe_plan: PlanObserver | None,
    ) -> None:
        self.cluster = cluster
        self.runtime = SimRuntime()
        self.network = Network(cluster.link, self.runtime)
        self.rng = Random(cluster.seed)
        # Of a worker that may be gone by then, nothing waits to be heard.
        is_shaken = bool(cluster.deaths or cluster.faults.happen or cluster.autoscale)
        habits = Habits(
            stats_period_ms=cluster.stats_period_ms,
            faults=cluster.faults,
            seed=cluster.seed,
            is_checked=cluster.is_checked,
            glides=cluster.glides,
            skips_ticks=cluster.glides and not is_shaken,
            tells_late=cluster.glides and not cluster.faults.happen,
            written=cluster.written,
            shows_plans=observe_plan is not None,
        )
        self.message_ns = Ns(round(cluster.message_ms * NS_PER_MS))
        self._late_loads = UnheardLoads(observe)
        self._router = RouterCore(cluster.router, self._late_kv, self._late_loads)
        self._core = FrontCore(self._router, cluster.front)
        self._records: list[RequestRecord] = []
        self._on_record = on_record or self._records.append
        self._telemetry = ClusterTelemetry(cluster.default_slo)
        self._observe, self._observe_plan = observe, observe_plan
        self._digest = hashlib.sha256()
        self._num_events = 0
        self._refused_ns: list[Ns] = []
        self._end_ns = Ns(0)  # of the last request
        self._living: dict[SeqId, SeqSpec] = {}
        self._outputs: dict[SeqId, list[int]] = {}  # where an answer may lead to a request
        self._arrivals = cluster.source.arrivals()
        self._num_coming = 0  # requests whose time is known
        machines = Machines(cluster.sharing, cluster.slow_down, cluster.slow_down_large)
        self._places = Places(self, cluster.pools, habits, machines, self._core.num_at)
        self._scaling: Scaling | None = None
        if cluster.autoscale is not None:
            slo, pools = cluster.default_slo, cluster.pools
            self._scaling = Scaling(self, cluster.autoscale, slo, pools, self._places, self._core)

    @property
    def is_over(self) -> bool:
        return not (self._living or self._num_coming)

    @property
    def is_quiet(self) -> bool:
        return not self._living

    def run(self) -> ClusterReport:
        self._next_arrival()
        places = self._places
        begin = tuple(places)
        for place in begin:
            places.start(place)
        if self._scaling is not None:
            self._scaling.begin()
        for number, dies_ns, back_ns in self.cluster.deaths:
            place, comes_back = begin[number], back_ns is not None
            self.runtime.call_at(dies_ns, partial(places.kill, place, comes_back=comes_back))
            if back_ns is not None:
                self.runtime.call_at(back_ns, partial(places.start, place))
        self.runtime.run(max_calls=MAX_CALLS)
        places.close(self._end_ns)
        self._core.check()
        stats = self._router.stats()
        if self._living or stats.num_in_flight or stats.num_waiting:
            raise InvariantError("requests never ended", seq_ids=list(self._living)[:8])
        places.note_uses(self._end_ns)
        return ClusterReport(
            trace_hash=self._digest.hexdigest(),
            num_events=self._num_events,
            end_ns=self._end_ns,
            records=self._records,
            refused_ns=tuple(self._refused_ns),
            num_migrations=self._core.num_migrations,
            num_handoffs=self._core.num_handoffs,
            router=stats,
            workers=places.uses,
            scaling=self._scaling.close() if self._scaling is not None else None,
        )

    # ---- requests

    def _next_arrival(self) -> None:
        spec = next(self._arrivals, None)
        if spec is not None:
            self._expect(spec, is_arrival=True)

    def _expect(self, spec: SeqSpec, *, is_arrival: bool = False) -> None:
        self._num_coming += 1
        way_ns = self.cluster.host.request.at(len(spec.prompt_tokens))
        at_ns = Ns(spec.arrived_ns + way_ns)
        self.runtime.call_at(at_ns, partial(self._arrive, spec, is_arrival))

    def _arrive(self, spec: SeqSpec, is_arrival: bool) -> None:
        if is_arrival:
            self._next_arrival()
        self._num_coming -= 1
        self._living[spec.seq_id] = spec
        if self.cluster.source.has_follow_ups:
            self._outputs[spec.seq_id] = []
        self.tell(Arrive((spec,)))

    def _read(self, word: EngineEffect) -> None:
        match word:
            case Emit(seq_id, tokens):
                if self._outputs:
                    self._outputs[seq_id] += tokens
            case Finish(seq_id):
                spec = self._end(seq_id, word.num_output_tokens)
                self._follow(spec, is_whole=word.reason in ENDS_OF_ANSWERS)
            case Reject(seq_id):
                spec = self._end(seq_id, -1)
                self._refused_ns.append(spec.arrived_ns)
                self._follow(spec, is_whole=False)

    def _follow(self, spec: SeqSpec, *, is_whole: bool) -> None:
        output = self._outputs.pop(spec.seq_id, None)
        if output is not None:
            answer = output if is_whole else ()
            following = self.cluster.source.follow_up(spec, answer, self._end_ns)
            if following is not None:
                self._expect(following)

    def _end(self, seq_id: SeqId, num_output_tokens: int) -> SeqSpec:
        spec = self._living.pop(seq_id, None)
        if spec is None:
            raise InvariantError("request ended twice", seq_id=seq_id)
        self._end_ns = self.runtime.now
        self._note(self._end_ns, seq_id, num_output_tokens)
        return spec

    # ---- the front end

    def tell(self, event: FrontEvent, times: TokenTimes = NO_TIMES) -> None:
        now = self.runtime.now
        effects = self._core.handle(now, event)
        self._num_events += 1
        if self._observe is not None:
            self._observe(now, event, effects)
        if self.cluster.is_checked:
            self._core.check()
        is_arrival = isinstance(event, Arrive)
        if not (effects or times or is_arrival):
            return
        words: list[EngineEffect] = []
        for effect in effects:
            match effect:
                case Forward(worker_id, forwarded):
                    if isinstance(forwarded, Arrive):
                        if self._scaling is not None:
                            self._scaling.sent(worker_id, forwarded.seqs)
                        self._note(now, worker_id, *(spec.seq_id for spec in forwarded.seqs))
                    self.later(partial(self._places[worker_id].receive, forwarded))
                case Resync(worker_id):
                    self.later(self._places[worker_id].send_snapshot)
                case CallAt(at_ns, timer_id):
                    self.runtime.call_at(at_ns, partial(self._ring, Timer(timer_id)))
                case _:
                    words.append(effect)
        if words or times or is_arrival:
            self._note_words(event, words, times)
            for word in words:
                self._read(word)
            if is_arrival and self._scaling is not None:
                self._scaling.arrived()

    def _note_words(self, event: FrontEvent, words: list[EngineEffect], times: TokenTimes) -> None:
        """Times of tokens come apart from these, many at once, before what comes after."""
        seen = event if isinstance(event, Arrive) else NOTHING
        if self._scaling is not None:
            self._scaling.note(seen, words)
        for seq_id, times_ns in times.items():
            if times_ns:
                emit_run(self._telemetry, seq_id, times_ns, self.message_ns)
        single = words
        if times:
            single = [
                word for word in words if not (isinstance(word, Emit) and word.seq_id in times)
            ]
            if not single:
                return
        for record in self._telemetry.observe(self.runtime.now, seen, single):
            self._on_record(read_by_client(record, self.cluster.host))
            if self._scaling is not None:
                self._scaling.end(record)

    def _late_kv(self, worker_ids: Sequence[WorkerId]) -> list[WorkerKv]:
        """What the router should have heard of the blocks of these workers by now."""
        events = []
        for worker_id in worker_ids:
            worker = self._places.worker(worker_id)
            event = worker.late_kv() if worker is not None else None
            if event is not None:
                events.append(event)
                if self._observe is not None:
                    self._observe(self.runtime.now, event, ())
        return events

    def hear_load(self, report: LoadReport) -> None:
        """The router takes it before it does anything that depends on it."""
        if self._router.num_waiting:
            self.tell(report.stats())
        else:
            self._late_loads.hear(self.runtime.now, report)

    def later(self, call: Callable[[], None]) -> None:
        self.runtime.call_later(self.message_ns, call)

    def keep(self, records: Sequence[RequestRecord]) -> None:
        for record in records:
            self._telemetry.tell(record)

    def _ring(self, timer: Timer) -> None:
        if not self.is_over:
            self.tell(timer)

    def _note(self, *figures: int) -> None:
        """Put into the trace."""
        self._digest.update(repr(figures).encode())

    # ---- workers

    def find_place(self, kv_address: str) -> SimWorker | None:
        return self._places.worker(WorkerId(int(kv_address)))

    def saw_plan(self, worker_id: WorkerId, plan: StepPlan) -> None:
        if self._observe_plan is not None:
            self._observe_plan(self.runtime.now, worker_id, plan)
