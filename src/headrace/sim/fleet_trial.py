"""One fleet under one traffic: simulated by the cores of production, over several seeds.

Every fleet meets the same requests at the same times (common random numbers), so that differences
between fleets are theirs.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, floor, inf, sqrt
from statistics import fmean, stdev
from typing import Final

import msgspec

from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.schema import RouterConfig
from headrace.core.cost.fitted import Link
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.replay import TraceSource
from headrace.core.workload.source import Source, Until
from headrace.core.workload.synthetic import SessionShape, Synthetic, SyntheticSource
from headrace.core.workload.traces import TraceRequest, spread
from headrace.plan.fleet import MAX_SEQS, Demand, Shape
from headrace.plan.queueing import PREFILL_FIRST, SPLIT
from headrace.sim.cluster import simulate_cluster
from headrace.sim.fleet_machine import device_of
from headrace.sim.progress import Seen, Watching, unwatched
from headrace.sim.setup import VOCAB, Layout, build_cluster
from headrace.sim.summary import Summary, Tally, wilson

NO_END_S: Final = 1e9
WHOLE_STEP_TOKENS: Final = 1 << 17  # of a step that takes prompts whole
TRACE_WARM_UP_SHARE: Final = 0.1  # of a trace's requests, which find caches empty
# Student's t of 95 %, two-sided, by degrees of freedom; beyond them the normal's.
# fmt: off
T_95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What comes: a profile at a rate, or a trace as it was. About `num_requests` are counted,
    after a warm-up in which sessions begin, or a trace's first requests fill the caches.
    """

    profile: WorkloadProfile  # lengths are means; its limits hold for every request
    load_per_s: float
    num_requests: int = 400
    trace: tuple[TraceRequest, ...] = ()  # in the order of their arrival
    speed: float = 1.0  # of the trace, by which its times were divided

    @classmethod
    def of_trace(cls, trace: Sequence[TraceRequest], slo: Slo, *, speed: float = 1.0) -> "Traffic":
        num, first = len(trace), trace[0]
        span_s = max(trace[-1].arrival_s - first.arrival_s, 1e-3)
        moved = (
            msgspec.structs.replace(one, arrival_s=one.arrival_s - first.arrival_s) for one in trace
        )
        profile = WorkloadProfile(
            name="trace",
            purpose="as recorded",
            prompt_tokens=round(fmean(one.prompt_tokens for one in trace)),
            output_tokens=max(1, round(fmean(one.output_tokens for one in trace))),
            shared_share=shareable(trace),
            slo=slo,
        )
        return cls(
            profile=profile,
            load_per_s=num / span_s,
            num_requests=num,
            trace=tuple(moved),
            speed=speed,
        )

    @property
    def warm_up_s(self) -> float:
        """By when sessions come and go as often as later; or a share of a trace."""
        if self.trace:
            return self.trace[int(TRACE_WARM_UP_SHARE * len(self.trace))].arrival_s
        return (self.profile.turns - 1) * self.profile.pause_s

    @property
    def until_s(self) -> float:
        if self.trace:
            return NO_END_S
        return self.warm_up_s + self.num_requests / self.load_per_s

    @property
    def num_counted(self) -> int:
        """As far as can be known before: how many come within a time is left to chance."""
        if self.trace:
            return len(self.trace) - int(TRACE_WARM_UP_SHARE * len(self.trace))
        return self.num_requests

    @property
    def num_coming(self) -> int:
        """About: while sessions begin, the load grows evenly to what it is later."""
        if self.trace:
            return len(self.trace)
        return self.num_requests + round(self.load_per_s * self.warm_up_s / 2)

    def num_may_miss(self, least: float, num_runs: int = 1) -> int:
        """In so many runs together, of which one more means that less than the share `least` can be
        good, as good as surely: three standard deviations more may come than expected.
        """
        expected = num_runs * self.num_counted
        most = expected + (0.0 if self.trace else 3.0 * sqrt(expected))
        return floor((1.0 - least) * most + 1e-9)

    @property
    def demand(self) -> Demand:
        profile, cached = self.profile, self.profile.shared_share
        if not self.trace:
            shape = SessionShape.of(profile)
            cached = max(0.0, 1.0 - shape.new / profile.prompt_tokens)
        return Demand(
            load_per_s=self.load_per_s,
            prompt_tokens=profile.prompt_tokens,
            output_tokens=profile.output_tokens,
            cached_share=cached,
            slo=profile.slo,
        )

    def source(self, seed: int, max_tokens: int) -> Source:
        slo = self.profile.slo
        if self.trace:
            requests = spread(self.trace, seed, speed=self.speed)
            return TraceSource(requests, slo=slo, vocab_size=VOCAB, seed=seed)
        turns = self.profile.turns
        description = Synthetic(
            profile=self.profile,
            arrivals=Arrivals.steady(self.load_per_s),
            # More than until the end; those that are left do not come.
            num_requests=turns * ceil(self.load_per_s * self.until_s + 10 * turns),
            max_tokens=max_tokens,
            vocab_size=VOCAB,
            seed=seed,
        )
        return Until(SyntheticSource(description), Ns(round(self.until_s * NS_PER_S)))


def shareable(trace: Sequence[TraceRequest]) -> float:
    """The share of prompt tokens that one cache without limit would find."""
    seen: set[int] = set()
    num_found = 0
    for one in trace:
        depth = 0
        for block in one.blocks:
            if block not in seen:
                break
            depth += 1
        num_found += min(depth * one.block_tokens, one.prompt_tokens)
        seen.update(one.blocks)
    return num_found / max(1, sum(one.prompt_tokens for one in trace))


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of a shape, in number, behind a router."""

    shape: Shape
    prefill_workers: int  # 0 = all do both
    decode_workers: int
    policy: str
    step_tokens: int  # 0 = what a calibrated engine has
    block_size: int = 16
    kv_link_bytes_per_s: float = 0.0  # of each worker; 0 = as the data sheet says

    @property
    def num_workers(self) -> int:
        return self.prefill_workers + self.decode_workers

    @property
    def num_engines(self) -> int:
        """That the router chooses among."""
        prompts = self.prefill_workers * self.shape.prefill.num_engines
        return prompts + self.decode_workers * self.shape.decode.num_engines

    @property
    def num_gpus(self) -> int:
        return self.shape.num_gpus(self.prefill_workers, self.decode_workers)

    @property
    def usd_per_hour(self) -> float:
        return self.shape.usd_per_hour(self.prefill_workers, self.decode_workers)

    @property
    def link_bytes_per_s(self) -> float:
        """Of an engine, by the slower of both kinds of workers."""
        own = self.kv_link_bytes_per_s
        kinds = self.shape.prefill, self.shape.decode
        return min((own or kind.link_bytes_per_s) / kind.num_engines for kind in kinds)

    def resized(self, prefill_workers: int, decode_workers: int) -> "Fleet":
        return msgspec.structs.replace(
            self, prefill_workers=prefill_workers, decode_workers=decode_workers
        )

    def __str__(self) -> str:
        number = f"{self.decode_workers}"
        if self.prefill_workers:
            number = f"{self.prefill_workers}P:{self.decode_workers}D"
        return f"{number} × {self.shape}, {self.policy}"


Misses = Mapping[str, Mapping[str, int]]
"""How many, by limit and by cause."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was ended, since more requests had missed a limit than may."""

    misses: Misses


class _Hopeless(Exception):
    pass


class _Watch:
    """Ends a run that cannot come to a share of good requests any more."""

    def __init__(self, warm_up_s: float, num_may_miss: float, seen: Seen) -> None:
        self._warm_up_ns = round(warm_up_s * NS_PER_S)
        self._left = num_may_miss
        self._misses: dict[str, dict[str, int]] = {}
        self.tally = Tally(warm_up_s)
        self._seen = seen

    def add(self, record: RequestRecord) -> None:
        self.tally.add(record)
        self._seen(record.finished_ns)
        if record.good or record.arrived_ns < self._warm_up_ns:
            return
        for miss in record.misses:
            causes = self._misses.setdefault(miss.metric.value, {})
            causes[miss.cause.value] = causes.get(miss.cause.value, 0) + 1
        self._left -= 1
        if self._left < 0:
            raise _Hopeless

    @property
    def cut(self) -> Cut:
        return Cut(misses=self._misses)


def run_fleet(
    fleet: Fleet,
    traffic: Traffic,
    seed: int,
    *,
    num_may_miss: float = inf,
    watching: Watching = unwatched,
) -> Summary | Cut:
    """Cut short when more requests than that have missed a limit."""
    shape = fleet.shape
    device, prompts = (device_of(kind, fleet.block_size) for kind in (shape.decode, shape.prefill))
    most_tokens = min(device.max_model_len, prompts.max_model_len)
    is_whole = shape.mode == PREFILL_FIRST
    num_decode = fleet.decode_workers * shape.decode.num_engines
    layout = Layout(
        mixed=0 if fleet.prefill_workers else num_decode,
        prefill=fleet.prefill_workers * shape.prefill.num_engines,
        decode=num_decode if fleet.prefill_workers else 0,
        step_tokens=min(WHOLE_STEP_TOKENS, most_tokens + MAX_SEQS)
        if is_whole
        else fleet.step_tokens,
        budget="fixed" if is_whole else "itl",
    )
    cluster = build_cluster(
        device,
        layout,
        traffic.source(seed, most_tokens),
        prefill_device=prompts,
        router=RouterConfig(policy=fleet.policy, seed=seed),
        handoff="always" if shape.mode == SPLIT else "never",
        slo=traffic.profile.slo,
        link=Link(latency_ns=10_000.0, byte_ns=NS_PER_S / max(1.0, fleet.link_bytes_per_s)),
        seed=seed,
    )
    with watching(f"{fleet}, seed {seed}", traffic.num_coming) as seen:
        watch = _Watch(traffic.warm_up_s, num_may_miss, seen)
        try:
            return watch.tally.summary(simulate_cluster(cluster, on_record=watch.add))
        except _Hopeless:
            return watch.cut


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds with its 95 % interval (Student's t); of one seed, without."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean = fmean(values)
        if len(values) < 2:
            return cls(mean, None, None)
        freedom = len(values) - 1
        t = T_95[freedom - 1] if freedom <= len(T_95) else 1.96
        half = t * stdev(values) / sqrt(len(values))
        return cls(mean, mean - half, mean + half)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet over all seeds."""

    fleet: Fleet
    runs: tuple[Summary, ...]  # in the order of the seeds

    @property
    def attainment(self) -> Interval:
        """The wider of two: over seeds, and over all requests as if they were independent."""
        found = Interval.of([run.attainment for run in self.runs])
        low, high = wilson(
            sum(run.num_good for run in self.runs), sum(run.num_requests for run in self.runs)
        )
        if found.low is not None and found.high is not None:
            low, high = min(low, max(0.0, found.low)), max(high, min(1.0, found.high))
        return Interval(found.mean, low, high)

    @property
    def costs(self) -> list[float]:
        """Dollars for a million output tokens of good requests, by seed; infinite where there are
        none.
        """
        usd_per_s = self.fleet.usd_per_hour / 3600
        rates = (run.good_output_tokens_per_s for run in self.runs)
        return [usd_per_s / rate * 1e6 if rate else inf for rate in rates]

    @property
    def cost(self) -> Interval | None:
        """Over seeds; None = one has no good request."""
        if inf in self.costs:
            return None
        found = Interval.of(self.costs)
        return found if found.low is None else Interval(found.mean, max(0.0, found.low), found.high)

    @property
    def rank(self) -> tuple[float, str]:
        """Cheapest first."""
        return (inf if self.cost is None else self.cost.mean), str(self.fleet)

    @property
    def misses(self) -> Misses:
        return together(run.num_misses_by_metric_and_cause for run in self.runs)

    def holds(self, target: float) -> bool:
        return self.attainment.mean >= target


def together(all_misses: Iterable[Misses]) -> Misses:
    found: dict[str, dict[str, int]] = {}
    for misses in all_misses:
        for metric, causes in misses.items():
            counts = found.setdefault(metric, {})
            for cause, count in causes.items():
                counts[cause] = counts.get(cause, 0) + count
    return found
