"""A fleet under an autoscaler and a virtual clock: replicas start late, drain, and die.

Decides how effects of the autoscaler are carried out, and where a request goes; refuses to know why
there are so many replicas. Any machine with the autoscaler's events and effects can take its part.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

import msgspec

from headrace.core.autoscaler.capacity import Replica
from headrace.core.autoscaler.events import (
    AutoscalerEffect,
    AutoscalerEvent,
    Drain,
    Observe,
    PoolWindow,
    Quantiles,
    ReplicaDown,
    ReplicaLoad,
    ReplicaUp,
    RequestWaiting,
    Scale,
    Tick,
)
from headrace.core.base.errors import InvariantError
from headrace.core.base.events import CallAt, Timer
from headrace.core.base.machine import Machine
from headrace.core.base.metrics import percentile
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.schema import SchedulerConfig
from headrace.sim.replica import Job, SimReplica
from headrace.sim.runtime import SimRuntime

Scaler = Machine[AutoscalerEvent, AutoscalerEffect]
ROLE: Final = Role.MIXED
BEGIN_NS: Final = Ns(0)
WINDOW_NS: Final = Ns(5 * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    scaler: Callable[[], Scaler]  # called at the begin, and at each restart
    replica: Replica
    slo: Slo  # ITL is judged by the mean gap of a request
    jobs: Iterable[Job]  # in the order of their arrival
    begin_ns: Ns = BEGIN_NS  # of what the report counts
    end_ns: Ns  # of the watch; what came by then is still served
    start_up_ns: Ns
    num_replicas: int = 1  # that serve at the begin
    window_ns: Ns = WINDOW_NS
    restarts: tuple[Ns, ...] = ()  # the scaler is lost, and a fresh one takes over
    gaps: tuple[tuple[Ns, Ns], ...] = ()  # from, to: no windows are told
    deaths: tuple[Ns, ...] = ()  # the oldest replica dies; its requests begin again elsewhere


@dataclass(slots=True)
class FleetReport:
    """`jobs` are those that came after the begin, as they ended; the rest is of that time too."""

    jobs: list[Job] = field(default_factory=list)
    targets: list[tuple[Ns, int]] = field(default_factory=list)  # that were asked for, after those
    effects: list[tuple[Ns, AutoscalerEffect]] = field(default_factory=list)  # but CallAt
    replica_ns: int = 0  # paid: from being asked for until gone
    most_replicas: int = 0  # at once, starting and draining ones included
    num_good: int = 0
    num_ups: int = 0  # times that more replicas were asked for
    num_downs: int = 0

    @property
    def attainment(self) -> float:
        return self.num_good / len(self.jobs) if self.jobs else 1.0


def simulate_fleet(setup: FleetSetup) -> FleetReport:
    """Run until every request has ended. Raises InvariantError where one never does."""
    return _Fleet(setup).run()


def poisson_jobs(
    rate_at: Callable[[float], float],
    most_per_s: float,
    end_s: float,
    seed: int,
    *,
    num_prompt: int = 400,
    num_uncached: int = 300,
    num_output: int = 100,
) -> Iterator[Job]:
    """Requests at `rate_at(second)` per second, by thinning (Lewis and Shedler 1979).

    Lengths are exponential around the given means, cut at four times these; of each prompt the same
    share is cached.
    """
    draw, now_s = Random(seed), 0.0
    while True:
        now_s += draw.expovariate(most_per_s)
        if now_s >= end_s:
            return
        if draw.random() * most_per_s < rate_at(now_s):
            prompt = 1 + min(4 * num_prompt, int(draw.expovariate(1 / num_prompt)))
            uncached = max(1, prompt * num_uncached // num_prompt)
            output = 1 + min(4 * num_output, int(draw.expovariate(1 / num_output)))
            yield Job(Ns(int(now_s * NS_PER_S)), prompt, uncached, output)


class _Fleet:
    def __init__(self, setup: FleetSetup) -> None:
        self.report = FleetReport()
        self._setup = setup
        self._runtime = SimRuntime()
        self._scaler = setup.scaler()
        self._epoch = 0  # timers of a lost scaler are lost with it
        self._jobs = iter(setup.jobs)
        self._num_open = 0  # requests
        self._replicas: dict[WorkerId, SimReplica] = {}  # those that serve or drain
        self._draining: set[WorkerId] = set()
        self._starting: dict[WorkerId, Ns] = {}  # since when
        self._since_ns: dict[WorkerId, Ns] = {}
        self._next_id = 0
        self._target = setup.num_replicas
        self._waiting: deque[Job] = deque()
        self._arrived: list[Job] = []  # within this window

    def run(self) -> FleetReport:
        runtime, setup = self._runtime, self._setup
        for _ in range(setup.num_replicas):
            self._serve(self._new_id(), Ns(0))
        self._introduce()
        self._next_job()
        runtime.call_at(setup.window_ns, self._close_window)
        for at_ns in setup.restarts:
            runtime.call_at(at_ns, self._restart)
        for at_ns in setup.deaths:
            runtime.call_at(at_ns, self._kill_oldest)
        runtime.run(max_calls=100_000_000)
        if self._num_open:
            raise InvariantError("requests that never ended", num_requests=self._num_open)
        return self.report

    # ---- requests

    def _next_job(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._runtime.call_at(job.arrived_ns, partial(self._arrive, job))

    def _arrive(self, job: Job) -> None:
        self._num_open += 1
        self._arrived.append(job)
        self._dispatch(job)
        self._next_job()

    def _dispatch(self, job: Job) -> None:
        usable = [one for key, one in self._replicas.items() if key not in self._draining]
        if usable:
            min(usable, key=lambda one: (one.queue_ns, one.num_jobs)).add(job)
        else:
            self._waiting.append(job)
            self._tell(RequestWaiting(ROLE))

    def _ended(self, replica: SimReplica, job: Job) -> None:
        self._num_open -= 1
        if job.arrived_ns >= self._setup.begin_ns:
            self.report.jobs.append(job)
            self.report.num_good += self._is_good(job)
        self._leave_if_empty(replica)

    def _is_good(self, job: Job) -> bool:
        slo = self._setup.slo
        is_soon = slo.ttft_ms is None or job.ttft_ms <= slo.ttft_ms
        return is_soon and (slo.itl_ms is None or job.tpot_ms <= slo.itl_ms)

    # ---- replicas

    def _new_id(self) -> WorkerId:
        self._next_id += 1
        return WorkerId(self._next_id)

    def _serve(self, replica_id: WorkerId, since_ns: Ns) -> None:
        self._since_ns[replica_id] = since_ns
        itl_ms = (self._setup.slo.itl_ms or 1e9) * (1.0 - SchedulerConfig().itl_margin)
        self._replicas[replica_id] = SimReplica(
            replica_id, self._setup.replica, itl_ms, self._runtime, self._ended
        )
        self._count()

    def _reconcile(self) -> None:
        serving = len(self._replicas) - len(self._draining)
        while serving + len(self._starting) > self._target and self._starting:
            self._pay(self._starting.popitem()[1])
        while serving + len(self._starting) < self._target:
            replica_id = self._new_id()
            self._starting[replica_id] = self._runtime.now
            self._runtime.call_later(self._setup.start_up_ns, partial(self._come_up, replica_id))
        self._count()

    def _come_up(self, replica_id: WorkerId) -> None:
        since_ns = self._starting.pop(replica_id, None)
        if since_ns is None:
            return  # it was let go meanwhile
        self._serve(replica_id, since_ns)
        self._tell(ReplicaUp(ROLE, replica_id))
        waiting, self._waiting = self._waiting, deque()
        for job in waiting:
            self._dispatch(job)

    def _leave_if_empty(self, replica: SimReplica) -> None:
        if replica.replica_id in self._draining and not replica.num_jobs:
            self._remove(replica.replica_id)

    def _remove(self, replica_id: WorkerId) -> SimReplica:
        self._draining.discard(replica_id)
        self._pay(self._since_ns.pop(replica_id))
        replica = self._replicas.pop(replica_id)
        self._tell(ReplicaDown(ROLE, replica_id))
        return replica

    def _kill_oldest(self) -> None:
        if self._replicas:
            replica = self._remove(min(self._replicas))
            replica.stop()
            for job in replica.jobs():
                self._dispatch(job)

    def _count(self) -> None:
        held = len(self._replicas) + len(self._starting)
        if self._runtime.now >= self._setup.begin_ns:
            self.report.most_replicas = max(self.report.most_replicas, held)

    def _pay(self, since_ns: Ns) -> None:
        begin_ns, end_ns = self._setup.begin_ns, self._setup.end_ns
        until_ns = min(self._runtime.now, end_ns)
        self.report.replica_ns += max(0, until_ns - max(since_ns, begin_ns))

    # ---- the autoscaler

    def _introduce(self) -> None:
        for replica_id in self._replicas:
            if replica_id not in self._draining:
                self._tell(ReplicaUp(ROLE, replica_id))
        self._tell(Tick())

    def _restart(self) -> None:
        self._scaler = self._setup.scaler()
        self._epoch += 1
        self._introduce()

    def _tell(self, event: AutoscalerEvent) -> None:
        for effect in self._scaler.handle(self._runtime.now, event):
            self._carry_out(effect)

    def _wake(self, epoch: int, timer: Timer) -> None:
        if epoch == self._epoch and not self._is_over():
            self._tell(timer)

    def _carry_out(self, effect: AutoscalerEffect) -> None:
        if isinstance(effect, CallAt):
            call = partial(self._wake, self._epoch, Timer(effect.timer_id))
            self._runtime.call_at(effect.at_ns, call)
            return
        is_counted = self._runtime.now >= self._setup.begin_ns
        if is_counted:
            self.report.effects.append((self._runtime.now, effect))
        match effect:
            case Scale(_, num_replicas):
                if is_counted:
                    self.report.targets.append((self._runtime.now, num_replicas))
                    self.report.num_ups += num_replicas > self._target
                    self.report.num_downs += num_replicas < self._target
                self._target = num_replicas
                self._reconcile()
            case Drain(_, replica_id) if replica_id in self._replicas:
                self._draining.add(replica_id)
                # After the effects at hand: going is the next thing that happens.
                replica = self._replicas[replica_id]
                self._runtime.call_later(Ns(0), partial(self._leave_if_empty, replica))
            case _:
                raise InvariantError("cannot be carried out", effect=effect)

    def _close_window(self) -> None:
        now = self._runtime.now
        window = self._window()
        self._arrived = []
        if not any(begin <= now < end for begin, end in self._setup.gaps):
            self._tell(Observe(window))
        if self._is_over():
            for since_ns in (*self._since_ns.values(), *self._starting.values()):
                self._pay(since_ns)
            self._since_ns = dict.fromkeys(self._since_ns, now)  # these are paid
        else:
            self._runtime.call_later(self._setup.window_ns, self._close_window)

    def _is_over(self) -> bool:
        return self._runtime.now >= self._setup.end_ns and not self._waiting

    def _window(self) -> PoolWindow:
        arrived, loads = self._arrived, []
        ended: list[Job] = []
        for replica in self._replicas.values():
            loads.append(_with_latencies(replica, self._is_good))
            ended += replica.ended
            replica.ended = []
        num_prompt = sum(job.num_prompt for job in arrived)
        num_cached = num_prompt - sum(job.num_uncached for job in arrived)
        return PoolWindow(
            role=ROLE,
            span_ns=self._setup.window_ns,
            num_arrivals=len(arrived),
            prompt_tokens=num_prompt / max(1, len(arrived)),
            output_tokens=sum(job.num_output for job in ended) / max(1, len(ended)),
            hit_rate=num_cached / max(1, num_prompt),
            num_waiting=len(self._waiting),
            num_starting=len(self._starting),
            num_draining=len(self._draining),
            replicas=tuple(loads),
        )


def _with_latencies(replica: SimReplica, is_good: Callable[[Job], bool]) -> ReplicaLoad:
    ended = replica.ended
    if not ended:
        return replica.load()
    return msgspec.structs.replace(
        replica.load(),
        num_samples=len(ended),
        num_good=sum(map(is_good, ended)),
        ttft_ms=_quantiles([job.ttft_ms for job in ended]),
        itl_ms=_quantiles([job.tpot_ms for job in ended]),
    )


def _quantiles(values: list[float]) -> Quantiles:
    values.sort()
    return Quantiles(*(percentile(values, share) for share in (0.5, 0.9, 0.99)))
