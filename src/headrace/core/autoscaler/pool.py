"""A pool as the autoscaler knows it: who is in it, what it did lately, what is expected of it.

Decides which measurements count; refuses to know how many replicas there should be.
"""

from collections import deque
from collections.abc import Iterable
from math import exp
from typing import Final, NamedTuple

from headrace.core.autoscaler.capacity import Capacity, Replica, Traffic
from headrace.core.autoscaler.events import PoolWindow, Quantiles, ReplicaLoad
from headrace.core.autoscaler.predictors import build_predictor
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.autoscaler import AutoscalerConfig

# Time constants: of the rate that the load loop goes by, and of the mean request.
RATE_NS: Final = 60 * NS_PER_S
TRAFFIC_NS: Final = 600 * NS_PER_S
# Where prompts and answers have pools of their own, a mix that changes is work for the other pool,
# which can have a replica of this one at once: that must be seen at once, too.
TRAFFIC_APART_NS: Final = 90 * NS_PER_S
LEAST_APART: Final = 30.0  # requests behind the mean one there, however few come
# Windows that measurements are gathered from, until there are enough.
MAX_PAST: Final = 120
# Weight of a new start in the expected duration of the next one.
START_WEIGHT: Final = 0.25


class Measured(NamedTuple):
    """How requests fared lately at replicas that were warm. Percentiles are the configured one:
    means over replicas, by their samples.
    """

    num_samples: int
    attainment: float
    ttft_ms: float
    itl_ms: float
    peak_rate: float  # requests/s, the most that the pool had meanwhile


class _Past(NamedTuple):
    """Of one window."""

    sampled: list[ReplicaLoad]  # the warm ones with requests that ended
    num_samples: int
    rate: float


class Pool:
    """Everything of one role. `slo` has the limits that this role can miss."""

    def __init__(self, role: Role, replica: Replica, config: AutoscalerConfig, slo: Slo) -> None:
        self.role = role
        self.replica = replica
        self.config = config
        self.slo = slo
        self.target: int | None = None  # replicas that there shall be; None = nothing is known yet
        self.up_ns: dict[WorkerId, Ns] = {}  # when those that serve came up
        self.leaving: dict[WorkerId, Role | None] = {}  # of these, with the pool they switch to
        self.arriving: set[WorkerId] = set()  # that switch to this pool
        self.is_woken = False  # a request waits, and nothing serves
        self.strain = 1.0  # by which work turned out harder than the cost model says
        self.demand: float | None = None  # requests/s, the most within the time decisions need
        self.predictor = build_predictor(config)
        self.needs: deque[tuple[Ns, int]] = deque()  # replicas that would have been enough
        self.over_since_ns: Ns | None = None  # limits are missed
        self.queue_ms = 0.0  # of each replica, at the last look
        self.idle_since_ns: Ns | None = None
        self.changed_ns = Ns(0)
        self.lead_ns = Ns(round(config.start_up_s * NS_PER_S))  # what a start takes
        self._asked_ns: deque[Ns] = deque()  # starts that have not come up
        self._window: PoolWindow | None = None
        self._past: deque[_Past] = deque(maxlen=MAX_PAST)
        self._seen_ns = Ns(0)  # the end of the window
        self.rate = 0.0  # requests/s lately
        self.capacity: Capacity | None = None  # of a replica; None before there was any traffic
        self._traffic: Traffic | None = None
        self._num_learned = 0.0  # requests behind it
        self._num_ended = 0.0  # requests behind what it says of outputs
        self._num_arrivals = 0  # in this interval of the throughput loop
        self._covered_ns = 0

    # ---- queries

    @property
    def active(self) -> list[WorkerId]:
        """Those that serve and stay."""
        return [replica_id for replica_id in self.up_ns if replica_id not in self.leaving]

    @property
    def num_draining(self) -> int:
        """Those that leave and are still paid for; whoever switches is counted where it goes."""
        told = self._window.num_draining if self._window else 0
        return max(told, sum(to_role is None for to_role in self.leaving.values()))

    @property
    def num_waiting(self) -> int:
        return self._window.num_waiting if self._window else 0

    def is_fresh(self, now: Ns) -> bool:
        return self._window is not None and now - self._seen_ns <= self.config.stale_s * NS_PER_S

    def is_settled(self, now: Ns) -> bool:
        """Everybody who shall serve does, and has for a while."""
        is_whole = len(self.active) == self.target
        return is_whole and now - self.changed_ns >= self.config.warm_up_s * NS_PER_S

    def warm_loads(self, now: Ns) -> list[ReplicaLoad]:
        """What replicas show that stay and are no longer young."""
        loads = self._window.replicas if self._window else ()
        warm_ns = now - self.config.warm_up_s * NS_PER_S
        warm = {replica_id for replica_id in self.active if self.up_ns[replica_id] <= warm_ns}
        return [load for load in loads if load.replica_id in warm]

    def measured(self) -> Measured | None:
        """The last requests, since the pool has changed; None where there are too few."""
        loads: list[ReplicaLoad] = []
        num_samples, peak_rate = 0, 0.0
        for past in reversed(self._past):
            loads += past.sampled
            num_samples += past.num_samples
            peak_rate = max(peak_rate, past.rate)
            if num_samples >= self.config.min_samples:
                break
        else:
            return None

        def mean(figures: Iterable[Quantiles | None]) -> float:
            weighted = zip(figures, loads, strict=True)
            return (
                sum(self._quantile(one) * load.num_samples for one, load in weighted) / num_samples
            )

        return Measured(
            num_samples,
            sum(load.num_good for load in loads) / num_samples,
            mean(load.ttft_ms for load in loads),
            mean(load.itl_ms for load in loads),
            peak_rate,
        )

    def _quantile(self, figure: Quantiles | None) -> float:
        value: float = getattr(figure, self.config.percentile) if figure else 0.0
        return value

    def victims(self, num_victims: int) -> list[WorkerId]:
        """Who leaves: those with the least cached, then the least to do, then the youngest."""
        loads = {load.replica_id: load for load in self._window.replicas} if self._window else {}

        def worth(replica_id: WorkerId) -> tuple[int, int, float, int]:
            load = loads.get(replica_id) or ReplicaLoad(replica_id=replica_id)
            work = (load.num_running, load.queue_ms)
            return (load.num_cached_tokens, *work, -self.up_ns[replica_id])

        return sorted(self.active, key=worth)[:num_victims]

    # ---- changes

    def observe(self, now: Ns, window: PoolWindow) -> None:
        if window.span_ns <= 0:
            return
        self._window = window
        self._seen_ns = Ns(now - window.age_ns)
        if self.target is None:
            self.target = len(self.active) + window.num_starting
            self.changed_ns = now
        self._num_arrivals += window.num_arrivals
        self._covered_ns += window.span_ns
        rate = window.num_arrivals * NS_PER_S / window.span_ns
        self.rate += (1.0 - exp(-window.span_ns / RATE_NS)) * (rate - self.rate)
        if self.is_settled(now):
            sampled = [load for load in self.warm_loads(now) if load.num_samples]
            num_samples = sum(load.num_samples for load in sampled)
            self._past.append(_Past(sampled, num_samples, self.rate))
        self._learn_traffic(window)
        if self.capacity is None:
            self._ask_cost_model()
        is_busy = window.num_arrivals or window.num_waiting
        if is_busy or any(load.num_running for load in window.replicas):
            self.idle_since_ns = None
        elif self.idle_since_ns is None:
            self.idle_since_ns = self._seen_ns

    def _learn_traffic(self, window: PoolWindow) -> None:
        """Windows count by their requests, and old ones fade with time: prompts by those that came,
        outputs by those that ended, which may be long after the last one came.
        """
        if self.role == Role.MIXED:
            usual = self.rate * TRAFFIC_NS / NS_PER_S
        else:
            usual = max(LEAST_APART, self.rate * TRAFFIC_APART_NS / NS_PER_S)
        before = self._traffic or Traffic(0.0, 0.0, 0.0)
        prompt, uncached, output = before.prompt_tokens, before.uncached_tokens, 0.0
        if window.num_arrivals:
            is_decode = self.role == Role.DECODE
            told = 0.0 if is_decode else window.prompt_tokens * (1 - window.hit_rate)
            self._num_learned = min(self._num_learned, usual) + window.num_arrivals
            weight = window.num_arrivals / self._num_learned
            prompt += weight * (window.prompt_tokens - prompt)
            uncached += weight * (told - uncached)
        if self.role != Role.PREFILL:
            output = self._learned_output(before.output_tokens, window, usual)
        if prompt:
            self._traffic = Traffic(prompt, uncached, output)

    def _learned_output(self, before: float, window: PoolWindow, usual: float) -> float:
        if not window.output_tokens:
            return before  # nothing has ended
        # Whoever tells of no samples is taken to end as many as come.
        num_ended = sum(load.num_samples for load in window.replicas) or window.num_arrivals or 1
        self._num_ended = min(self._num_ended, usual) + num_ended
        return before + num_ended / self._num_ended * (window.output_tokens - before)

    def close_interval(self, interval_ns: int) -> None:
        """Tell the predictor what came in this interval; it may be that nothing is known."""
        is_known = self._covered_ns * 2 >= interval_ns
        self.predictor.add(self._num_arrivals * NS_PER_S / self._covered_ns if is_known else None)
        self._num_arrivals = self._covered_ns = 0
        self._ask_cost_model()
        num_steps = 1 + -(-self.lead_ns // interval_ns)
        values = (self.predictor.predict(step) for step in range(1, num_steps + 1))
        self.demand = max((value for value in values if value is not None), default=None)

    def _ask_cost_model(self) -> None:
        """What a replica can do under the traffic that there was."""
        config = self.config
        if self._traffic is not None:
            self.capacity = Capacity(
                self.replica,
                self._traffic,
                self.slo,
                percentile=config.percentile,
                margin=config.margin,
            )

    def remember_need(self, now: Ns, need: int) -> int | None:
        """The most that was needed within the delay; None while less than that is known."""
        since_ns = now - self.config.down_delay_s * NS_PER_S
        self.needs.append((now, need))
        while len(self.needs) > 1 and self.needs[1][0] <= since_ns:
            self.needs.popleft()
        if self.needs[0][0] > since_ns:
            return None
        return max(need for _, need in self.needs)

    def ask(self, now: Ns, target: int) -> None:
        num_starts = target - len(self.active) - len(self.arriving)
        while len(self._asked_ns) > max(0, num_starts):
            self._asked_ns.pop()
        while len(self._asked_ns) < num_starts:
            self._asked_ns.append(now)
        self.target = target
        self._change(now)

    def up(self, now: Ns, replica_id: WorkerId) -> None:
        if replica_id in self.up_ns:
            return
        self.up_ns[replica_id] = now
        self._change(now)
        if replica_id in self.arriving:
            self.arriving.remove(replica_id)
        elif self._asked_ns:
            took_ns = now - self._asked_ns.popleft()
            self.lead_ns = Ns(round(self.lead_ns + START_WEIGHT * (took_ns - self.lead_ns)))
        self.is_woken = False

    def down(self, now: Ns, replica_id: WorkerId) -> bool:
        """Whether it was missed: nobody had asked it to go."""
        was_known = replica_id in self.up_ns or replica_id in self.arriving
        was_asked = replica_id in self.leaving
        self.up_ns.pop(replica_id, None)
        self.arriving.discard(replica_id)
        self.leaving.pop(replica_id, None)
        if was_known:
            self._change(now)
        return was_known and not was_asked

    def leave(self, replica_ids: Iterable[WorkerId], to_role: Role | None = None) -> None:
        for replica_id in replica_ids:
            self.leaving[replica_id] = to_role

    def _change(self, now: Ns) -> None:
        """What was measured was measured of another pool."""
        self.changed_ns = now
        self.forget_latencies()

    def forget_latencies(self) -> None:
        self._past.clear()
