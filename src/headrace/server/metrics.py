"""/metrics in Prometheus form: this program's own names, and those that dashboards for vLLM know.

What happens is counted on the engine thread from the same events and effects that the telemetry
folds; what is (queue lengths, blocks) is asked of the engine when Prometheus asks. Labels have
closed sets of values.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.core.base.events import Arrive, Emit, EngineEffect, EngineEvent, Finish, Reject
from headrace.core.base.types import Ns
from headrace.core.config.schema import TelemetryConfig
from headrace.live.engine import LiveEngine

CONTENT_TYPE = CONTENT_TYPE_LATEST

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


class Metrics:
    """Counts of one server, in a registry of its own. `attach` connects it with the engine, whose
    thread counts.
    """

    def __init__(self, telemetry: TelemetryConfig) -> None:
        self._own = CollectorRegistry()
        self._engine: LiveEngine | None = None
        self._vllm_labels: dict[str, str] = {}
        self.http_in_flight = Gauge(
            "headrace_http_requests_in_flight", "HTTP requests under way", registry=self._own
        )
        self._http = self._counter(
            "http_requests", "HTTP requests answered", "route", "method", "status"
        )
        self._arrived = self._counter("arrived_seqs", "sequences that arrived")
        self._rejected = self._counter("rejected_seqs", "sequences not accepted", "status")
        self._finished = self._counter(
            "finished_seqs", "accepted sequences ended", "finished_reason"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of ended sequences")
        self._output_tokens = self._counter("output_tokens", "tokens made")

    def attach(self, engine: LiveEngine, model_name: str) -> None:
        self._engine = engine
        self._vllm_labels = {"model_name": model_name, "engine": "0"}
        engine.observe(self._observe)

    def render(self) -> bytes:
        return generate_latest(_View(self._families))

    def count_http(self, method: str, path: str, status: int) -> None:
        if path.startswith("/v1/models/"):
            path = "/v1/models/{id}"
        elif path not in _ROUTES:
            path = "other"
        self._http.labels(path, method if method in _METHODS else "other", str(status)).inc()

    # ---- on the engine thread

    def _observe(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        if isinstance(event, Arrive):
            self._arrived.inc(len(event.seqs))
        for effect in effects:
            match effect:
                case Emit():
                    self._output_tokens.inc(len(effect.tokens))
                case Finish():
                    self._finished.labels(effect.reason.value).inc()
                    self._prompt_tokens.inc(effect.num_prompt_tokens)
                case Reject():
                    self._rejected.labels(str(effect.status_hint)).inc()
                case _:
                    pass

    # ---- families

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"headrace_{name}", help, labels, registry=self._own)

    def _families(self) -> Iterator[Metric]:
        for family in (*self._own.collect(), *self._engine_families()):
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family
            if (alias := ALIASES.get(family.name)) and self._engine is not None:
                yield _renamed(family, alias, self._vllm_labels)

    def _engine_families(self) -> Iterable[Metric]:
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
            ("preemptions", "sequences whose blocks were taken", stats.num_preemptions),
            ("recomputed_tokens", "tokens computed again", stats.num_recomputed_tokens),
            ("prefix_queried_tokens", "prompt tokens looked up", stats.num_queried_tokens),
            ("prefix_hit_tokens", "prompt tokens found", stats.num_hit_tokens),
        ):
            yield CounterMetricFamily(f"headrace_{name}", help, value)


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
