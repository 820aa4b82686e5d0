"""What a simulated run comes to: goodput, latencies, why limits were missed, how busy workers were.

Folds records one by one and keeps a few figures of each, so that a million requests fit.
"""

from array import array
from collections import Counter
from math import sqrt

import msgspec

from headrace.core.base.metrics import per_second, percentile
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns
from headrace.core.telemetry import RequestRecord
from headrace.sim.cluster import ClusterReport

CONFIDENCE_Z = 1.96  # of 95 %


class Quantiles(msgspec.Struct, frozen=True):
    """None where nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: "array[float]") -> "Quantiles":
        if not values:
            return cls(None, None, None, None)
        ordered = sorted(values)
        shares = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(sum(ordered) / len(ordered), *shares)


class RoleUse(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one role together."""

    role: str
    num_workers: int  # lives of workers, where some died
    utilisation: float  # share of their time in steps
    steps_per_s: float  # of one worker
    tokens_per_step: float
    num_preemptions: int
    imbalance: float  # tokens computed by the worker that had most, over the mean


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that came within the warm-up are not counted. Rates are over the time of arrivals;
    where requests come as others end, or all at once, it goes on until the last end.

    A request without a limit is good when it is served. Attainment is the share of good ones, with
    its 95 % interval by Wilson (1927), which takes requests for independent.
    """

    num_requests: int
    num_rejected: int
    num_good: int
    span_s: float  # from the first counted arrival to the last, or to the last end
    load_per_s: float
    goodput_per_s: float
    attainment: float
    attainment_low: float
    attainment_high: float
    ttft_ms: Quantiles
    tpot_ms: Quantiles  # requests of one token have none
    worst_itl_ms: Quantiles  # the longest gap of each request
    e2e_ms: Quantiles
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    good_output_tokens_per_s: float  # of good requests
    hit_rate: float  # prompt tokens found in caches
    num_misses_by_metric_and_cause: dict[str, dict[str, int]]
    num_migrations: int
    num_handoffs: int
    roles: tuple[RoleUse, ...]
    end_s: float
    trace_hash: str


class Tally:
    """Folds records as they come."""

    def __init__(self, warm_up_s: float = 0.0, *, is_closed: bool = False) -> None:
        """`is_closed`: requests come as others end."""
        self._warm_up_ns = round(warm_up_s * NS_PER_S)
        self._is_closed = is_closed
        self._latencies = {name: array("d") for name in ("ttft", "tpot", "itl", "e2e")}
        self._misses: Counter[tuple[str, str]] = Counter()
        self._first_ns: Ns | None = None
        self._last_ns = self._end_ns = Ns(0)
        self._num_requests = self._num_good = 0
        self._num_prompt = self._num_cached = self._num_output = self._num_good_output = 0

    def add(self, record: RequestRecord) -> None:
        if record.arrived_ns < self._warm_up_ns:
            return
        self._came(record.arrived_ns)
        self._end_ns = max(record.finished_ns, self._end_ns)
        self._num_requests += 1
        self._num_good += record.good
        self._num_prompt += record.num_prompt_tokens
        self._num_cached += record.num_cached_tokens
        self._num_output += record.num_output_tokens
        self._num_good_output += record.good * record.num_output_tokens
        figures = {
            "ttft": record.ttft_ns,
            "tpot": record.tpot_ns,
            "itl": record.max_itl_ns,
            "e2e": record.e2e_ns,
        }
        for name, value in figures.items():
            if value is not None:
                self._latencies[name].append(value / NS_PER_MS)
        for miss in record.misses:
            self._misses[miss.metric.value, miss.cause.value] += 1

    def _came(self, at_ns: Ns) -> None:
        self._first_ns = at_ns if self._first_ns is None else min(at_ns, self._first_ns)
        self._last_ns = max(at_ns, self._last_ns)

    def _span_ns(self) -> Ns:
        first_ns = self._first_ns or 0
        is_at_once = self._last_ns == first_ns
        end_ns = (
            max(self._last_ns, self._end_ns) if self._is_closed or is_at_once else self._last_ns
        )
        return Ns(end_ns - first_ns)

    def summary(self, report: ClusterReport) -> Summary:
        refused_ns = [at_ns for at_ns in report.refused_ns if at_ns >= self._warm_up_ns]
        for at_ns in refused_ns:
            self._came(at_ns)
        num_all, span_ns = self._num_requests + len(refused_ns), self._span_ns()
        low, high = wilson(self._num_good, num_all)
        misses: dict[str, dict[str, int]] = {}
        for (metric, cause), count in sorted(self._misses.items(), key=lambda one: -one[1]):
            misses.setdefault(metric, {})[cause] = count
        return Summary(
            num_requests=num_all,
            num_rejected=len(refused_ns),
            num_good=self._num_good,
            span_s=span_ns / NS_PER_S,
            load_per_s=per_second(num_all, span_ns),
            goodput_per_s=per_second(self._num_good, span_ns),
            attainment=self._num_good / num_all if num_all else 1.0,
            attainment_low=low,
            attainment_high=high,
            ttft_ms=Quantiles.of(self._latencies["ttft"]),
            tpot_ms=Quantiles.of(self._latencies["tpot"]),
            worst_itl_ms=Quantiles.of(self._latencies["itl"]),
            e2e_ms=Quantiles.of(self._latencies["e2e"]),
            prompt_tokens_per_s=per_second(self._num_prompt, span_ns),
            output_tokens_per_s=per_second(self._num_output, span_ns),
            good_output_tokens_per_s=per_second(self._num_good_output, span_ns),
            hit_rate=self._num_cached / max(1, self._num_prompt),
            num_misses_by_metric_and_cause=misses,
            num_migrations=report.num_migrations,
            num_handoffs=report.num_handoffs,
            roles=role_uses(report),
            end_s=report.end_ns / NS_PER_S,
            trace_hash=report.trace_hash,
        )


def role_uses(report: ClusterReport) -> tuple[RoleUse, ...]:
    uses = []
    for role in dict.fromkeys(worker.role for worker in report.workers):
        workers = [worker for worker in report.workers if worker.role is role]
        up_ns = max(1, sum(worker.up_ns for worker in workers))
        num_steps = sum(worker.stats.num_steps for worker in workers)
        tokens = [worker.stats.num_computed_tokens for worker in workers]
        num_tokens = sum(tokens)
        uses.append(
            RoleUse(
                role=role.value,
                num_workers=len(workers),
                utilisation=sum(worker.busy_ns for worker in workers) / up_ns,
                steps_per_s=num_steps / up_ns * NS_PER_S,
                tokens_per_step=num_tokens / max(1, num_steps),
                num_preemptions=sum(worker.stats.num_preemptions for worker in workers),
                imbalance=max(tokens) * len(tokens) / max(1, num_tokens),
            )
        )
    return tuple(uses)


def wilson(num_good: float, num_all: float) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927)."""
    if not num_all:
        return 0.0, 1.0
    share, z2 = num_good / num_all, CONFIDENCE_Z**2
    centre = share + z2 / (2 * num_all)
    half = CONFIDENCE_Z * sqrt(share * (1 - share) / num_all + z2 / (4 * num_all**2))
    scale = 1 + z2 / num_all
    # Rounding must not leave the share itself outside.
    return min(share, max(0.0, (centre - half) / scale)), max(
        share, min(1.0, (centre + half) / scale)
    )
