"""/metrics in Prometheus form: this program's own names, and those that dashboards for vLLM know.

What clients saw is folded from the engine's events on the engine's thread, by the telemetry that
the simulator uses too; totals and what is (queue lengths, blocks) are read when Prometheus asks.
Labels have closed sets of values.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.core.base.events import EngineEffect, EngineEvent
from headrace.core.base.request import FinishReason
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.telemetry import TelemetryConfig
from headrace.core.telemetry import (
    Answers,
    Cause,
    ClientWait,
    Counters,
    GoodputWindow,
    RequestRecord,
)
from headrace.core.telemetry.record import ITL_BOUNDS_NS
from headrace.core.telemetry.windows import WINDOWS_S
from headrace.live.port import Engine, PoolStatus, Records, WorkerState
from headrace.live.traffic import EngineTraffic

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

# Own family name -> vLLM's. Own labels stay; vLLM's model_name and engine are added.
ALIASES = {
    "headrace_running_seqs": "vllm:num_requests_running",
    "headrace_waiting_seqs": "vllm:num_requests_waiting",
    "headrace_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "headrace_prefix_queried_tokens": "vllm:prefix_cache_queries",
    "headrace_prefix_hit_tokens": "vllm:prefix_cache_hits",
    "headrace_preemptions": "vllm:num_preemptions",
    "headrace_ttft_seconds": "vllm:time_to_first_token_seconds",
    "headrace_itl_seconds": "vllm:inter_token_latency_seconds",
    "headrace_tpot_seconds": "vllm:request_time_per_output_token_seconds",
    "headrace_e2e_seconds": "vllm:e2e_request_latency_seconds",
    "headrace_queue_seconds": "vllm:request_queue_time_seconds",
    "headrace_prefill_seconds": "vllm:request_prefill_time_seconds",
    "headrace_decode_seconds": "vllm:request_decode_time_seconds",
    "headrace_prompt_tokens": "vllm:prompt_tokens",
    "headrace_output_tokens": "vllm:generation_tokens",
    "headrace_finished_seqs": "vllm:request_success",
}

_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/health",
        "/ready",
        "/metrics",
        "/version",
    }
)
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})


_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
)


class Metrics:
    """Figures of one server. `attach` connects them with the engine, whose thread feeds them."""

    def __init__(self, config: TelemetryConfig) -> None:
        self._own = CollectorRegistry()
        self._engine: Engine | None = None
        self._vllm_labels: dict[str, str] = {}
        self._slo = config.slo
        self._telemetry: Records | None = None
        self._counters = Counters()
        self._answers = Answers()
        self._traffic: EngineTraffic | None = None
        self._window = GoodputWindow()
        self.http_in_flight = Gauge(
            "headrace_http_requests_in_flight", "HTTP requests under way", registry=self._own
        )
        self._http = self._counter(
            "http_requests", "HTTP requests answered", "route", "method", "status"
        )
        self._good = self._counter("goodput_requests", "sequences that kept every latency limit")
        self._misses = self._counter(
            "slo_miss", "latency limits not kept, by what took the time", "metric", "cause"
        )
        self._ttft = self._histogram("ttft", "arrival to first token")
        self._tpot = self._histogram("tpot", "time per output token after the first")
        self._e2e = self._histogram("e2e", "arrival to end")
        self._queue = self._histogram("queue", "arrival to first admission")
        self._prefill = self._histogram("prefill", "first admission to first token")
        self._decode = self._histogram("decode", "first token to last token")
        self._itl_counts = [0] * (len(ITL_BOUNDS_NS) + 1)
        self._itl_sum_ns = 0
        self._spent_ns = dict.fromkeys(Cause, 0)

    def attach(self, engine: Engine, model_name: str, traffic: EngineTraffic | None = None) -> None:
        """Before the engine's first sequence. `traffic` hears what is measured here, too."""
        self._engine = engine
        self._traffic = traffic
        self._telemetry = engine.telemetry(self._slo)
        self._vllm_labels = {"model_name": model_name, "engine": "0"}
        engine.observe(self._observe)

    def render(self) -> bytes:
        return generate_latest(_View(self._families))

    def check(self) -> None:
        """Raise InvariantError unless what arrived, waits, runs and ended adds up (when idle)."""
        self._counters.check()

    def count_http(self, method: str, path: str, status: int) -> None:
        if path.startswith("/v1/models/"):
            path = "/v1/models/{id}"
        elif path not in _ROUTES:
            path = "other"
        self._http.labels(path, method if method in _METHODS else "other", str(status)).inc()

    def leave(self, request_ids: Sequence[str], wait: ClientWait | None) -> None:
        """The answer to these requests of the engine, if it had any, has left the server; until
        then its sequences count as unfinished in all that is measured to their end.
        """
        if self._engine is not None and request_ids:
            self._engine.call_soon(partial(self._leave, request_ids, wait))

    # ---- on the engine thread

    def _observe(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        self._counters.observe(event, effects)
        self._window.observe(now, event, effects)
        if self._traffic is not None:
            self._traffic.observe(event, effects)
        assert self._telemetry is not None
        records = self._telemetry.observe(now, event, effects)
        for record in self._answers.observe(event, effects, records):
            self._record(now, record)

    def _leave(self, request_ids: Sequence[str], wait: ClientWait | None, now: Ns) -> None:
        for request_id in request_ids:
            for record in self._answers.leave(request_id, wait):
                self._record(now, record)

    def _record(self, now: Ns, record: RequestRecord) -> None:
        self._window.count(now, record)
        if self._traffic is not None:
            self._traffic.ended(record)
        for cause, spent_ns in record.time.by_cause().items():
            self._spent_ns[cause] += spent_ns
        self._e2e.observe(record.e2e_ns / NS_PER_S)
        if record.admitted_ns is not None:
            self._queue.observe((record.admitted_ns - record.arrived_ns) / NS_PER_S)
        if record.ttft_ns is not None:
            self._ttft.observe(record.ttft_ns / NS_PER_S)
            self._decode.observe(record.itl.sum_ns / NS_PER_S)
        if record.first_token_ns is not None and record.admitted_ns is not None:
            self._prefill.observe((record.first_token_ns - record.admitted_ns) / NS_PER_S)
        if record.tpot_ns is not None:
            self._tpot.observe(record.tpot_ns / NS_PER_S)
        self._itl_sum_ns += record.itl.sum_ns
        for place, count in enumerate(record.itl.histogram):
            self._itl_counts[place] += count
        if record.good:
            self._good.inc()
        for miss in record.misses:
            self._misses.labels(miss.metric.value, miss.cause.value).inc()

    # ---- families

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"headrace_{name}", help, labels, registry=self._own)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"headrace_{name}_seconds", help, registry=self._own, buckets=_SECONDS)

    def _families(self) -> Iterator[Metric]:
        made = (*self._totals(), self._spent(), self._itl(), *self._lately(), *self._now())
        for family in (*self._own.collect(), *made):
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family
            if (alias := ALIASES.get(family.name)) and self._engine is not None:
                yield _renamed(family, alias, self._vllm_labels)

    def _totals(self) -> Iterable[Metric]:
        counters = self._counters
        rejected = CounterMetricFamily(
            "headrace_rejected_seqs", "sequences not accepted", labels=["code"]
        )
        for code, count in counters.num_rejected.copy().items():
            rejected.add_metric([code], count)
        yield rejected
        finished = CounterMetricFamily(
            "headrace_finished_seqs", "accepted sequences that ended", labels=["finished_reason"]
        )
        for reason in FinishReason:
            finished.add_metric([reason.value], counters.num_finished[reason])
        yield finished
        yield from (
            CounterMetricFamily(f"headrace_{name}", help, value)
            for name, help, value in (
                ("accepted_seqs", "sequences accepted", counters.num_accepted),
                ("prompt_tokens", "prompt tokens of ended sequences", counters.num_prompt_tokens),
                ("output_tokens", "tokens made", counters.num_output_tokens),
            )
        )

    def _spent(self) -> Metric:
        family = CounterMetricFamily(
            "headrace_spent_seconds", "arrival to end, by what took the time", labels=["cause"]
        )
        for cause, spent_ns in self._spent_ns.items():
            family.add_metric([cause.value], spent_ns / NS_PER_S)
        return family

    def _lately(self) -> Iterable[Metric]:
        goodput = GaugeMetricFamily(
            "headrace_goodput_requests_per_second",
            "sequences that kept every latency limit, of those that ended within the window",
            labels=["window"],
        )
        attainment = GaugeMetricFamily(
            "headrace_slo_attainment_ratio",
            "part of those that ended or were refused for want of room within the window",
            labels=["window"],
        )
        now = Ns(time.monotonic_ns())
        for window_s in WINDOWS_S:
            rates = self._window.query(now, window_s)
            goodput.add_metric([f"{window_s}s"], rates.goodput_per_s)
            if rates.attainment is not None:  # of none there is no part
                attainment.add_metric([f"{window_s}s"], rates.attainment)
        yield goodput
        yield attainment

    def _itl(self) -> Metric:
        bounds = [*(f"{bound / NS_PER_S:g}" for bound in ITL_BOUNDS_NS), "+Inf"]
        family = HistogramMetricFamily("headrace_itl_seconds", "gaps between tokens")
        buckets = list(zip(bounds, map(float, accumulate(self._itl_counts)), strict=True))
        family.add_metric([], buckets, self._itl_sum_ns / NS_PER_S)
        return family

    def _now(self) -> Iterable[Metric]:
        if self._engine is None:
            return
        stats = self._engine.stats()
        in_use = stats.num_pinned_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield _gauge("running_seqs", "sequences that are being computed", stats.num_running)
        yield _gauge("waiting_seqs", "sequences that wait", stats.num_waiting)
        yield _gauge("kv_usage_ratio", "part of the KV blocks that sequences hold", in_use)
        blocks = GaugeMetricFamily("headrace_kv_blocks", "KV blocks by state", labels=["state"])
        blocks.add_metric(["free"], stats.num_free_blocks)
        blocks.add_metric(["cached"], stats.num_cached_blocks)
        blocks.add_metric(["pinned"], stats.num_pinned_blocks)
        yield blocks
        for name, help, value in (
            ("computed_tokens", "rows of all steps", stats.num_computed_tokens),
            ("steps", "steps done", stats.num_steps),
            ("failed_steps", "steps that failed", stats.num_failed_steps),
            ("migrations", "requests that outlived their worker", stats.num_migrations),
            ("handoffs", "requests whose prompt another worker computed", stats.num_handoffs),
            ("handoff_recalls", "hand-offs taken from a silent worker", stats.num_recalls),
            ("failed_kv_loads", "KV of others that came late or not whole", stats.num_failed_loads),
            ("preemptions", "sequences whose blocks were taken", stats.num_preemptions),
            ("recomputed_tokens", "tokens computed again", stats.num_recomputed_tokens),
            ("prefix_queried_tokens", "prompt tokens looked up", stats.num_queried_tokens),
            ("prefix_hit_tokens", "prompt tokens found", stats.num_hit_tokens),
        ):
            yield CounterMetricFamily(f"headrace_{name}", help, value)
        if workers := self._engine.workers():
            yield from _workers(workers)
        if pools := self._engine.pools():
            yield from _pools(pools)


def _workers(workers: Sequence[WorkerState]) -> Iterable[Metric]:
    """Of each process, where there are several."""
    up = GaugeMetricFamily("headrace_worker_up", "whether it takes requests", labels=["worker"])
    starts = CounterMetricFamily(
        "headrace_worker_starts", "processes that were started for it", labels=["worker"]
    )
    losses = CounterMetricFamily(
        "headrace_worker_losses", "lives of it that were lost, by cause", labels=["worker", "cause"]
    )
    last_loss = GaugeMetricFamily(
        "headrace_worker_last_loss", "1, with the cause of the last one", labels=["worker", "cause"]
    )
    phase = GaugeMetricFamily(
        "headrace_worker_phase", "1, with what it is about", labels=["worker", "phase"]
    )
    role = GaugeMetricFamily(
        "headrace_worker_role", "1, with what it is for", labels=["worker", "role"]
    )
    states = {
        name: GaugeMetricFamily(f"headrace_worker_{name}", help, labels=["worker"])
        for name, help in (
            ("running_seqs", "sequences that it computes"),
            ("waiting_seqs", "sequences that wait there"),
            ("kv_usage_ratio", "part of its KV blocks that sequences hold"),
        )
    }
    for worker in workers:
        up.add_metric([worker.name], worker.is_ready)
        starts.add_metric([worker.name], worker.num_starts)
        phase.add_metric([worker.name, worker.phase.value], 1)
        role.add_metric([worker.name, worker.role], 1)
        for cause, num_losses in worker.losses.items():
            losses.add_metric([worker.name, cause], num_losses)
        if worker.cause:
            last_loss.add_metric([worker.name, worker.cause], 1)
        if (stats := worker.stats) is not None:
            states["running_seqs"].add_metric([worker.name], stats.num_running)
            states["waiting_seqs"].add_metric([worker.name], stats.num_waiting)
            in_use = stats.num_pinned_blocks / stats.num_blocks if stats.num_blocks else 0.0
            states["kv_usage_ratio"].add_metric([worker.name], in_use)
    return (up, starts, phase, role, losses, last_loss, *states.values())


def _pools(pools: Sequence[PoolStatus]) -> Iterable[Metric]:
    """What an autoscaler wants, has, and last decided for which reason."""
    wanted = GaugeMetricFamily(
        "headrace_autoscaler_wanted_workers", "workers that there shall be", labels=["role"]
    )
    actual = GaugeMetricFamily(
        "headrace_autoscaler_workers", "workers by state", labels=["role", "state"]
    )
    decision = GaugeMetricFamily(
        "headrace_autoscaler_last_decision",
        "1, with what led to it, what binds by its forecast, and whether more were wanted",
        labels=["role", "loop", "constraint", "limited"],
    )
    for pool in pools:
        wanted.add_metric([pool.role], pool.num_wanted)
        actual.add_metric([pool.role, "ready"], pool.num_ready)
        actual.add_metric([pool.role, "starting"], pool.num_starting)
        actual.add_metric([pool.role, "draining"], pool.num_draining)
        if pool.loop:
            limited = "true" if pool.is_limited else "false"
            decision.add_metric([pool.role, pool.loop, pool.constraint, limited], 1)
    return (wanted, actual, decision)


class _View(Collector):
    """What `generate_latest` reads: families that are made when asked for."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headrace_{name}", help, value)


def _renamed(family: Metric, name: str, labels: dict[str, str]) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    copy.samples = [
        Sample(name + one.name.removeprefix(family.name), one.labels | labels, *one[2:])
        for one in family.samples
    ]
    return copy
