"""/metrics of a gateway: its own figures, and those of its router. What engines count, they show
themselves.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from headrace.cluster.gateway.engine import Engine
from headrace.cluster.gateway.kv_sources import KvSources
from headrace.core.router.core import RouterCore

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GatewayMetrics(Collector):
    def __init__(
        self,
        engines: Sequence[Engine],
        kv: KvSources,
        router: RouterCore,
        routes: frozenset[str],
    ) -> None:
        self._engines = engines
        self._kv = kv
        self._router = router
        self._routes = routes
        self._own = CollectorRegistry()
        self.http_in_flight = Gauge(
            "headrace_http_requests_in_flight", "HTTP requests under way", registry=self._own
        )
        self._http = self._counter(
            "http_requests", "HTTP requests answered", "route", "method", "status"
        )
        self._faults = self._counter(
            "engine_faults", "requests that an engine did not answer as it should", "engine", "kind"
        )
        self._retries = self._counter("retries", "requests that were sent to another engine")
        self._broken = self._counter("broken_answers", "answers that broke off in the middle")
        self.first_byte = Histogram(
            "headrace_first_byte_seconds",
            "arrival to the first byte of the answer's body",
            registry=self._own,
            buckets=_SECONDS,
        )

    def count_http(self, method: str, path: str, status: int) -> None:
        route = path if path in self._routes else "other"
        self._http.labels(route, method if method in ("GET", "POST") else "other", status).inc()

    def count_fault(self, engine_name: str, kind: str) -> None:
        self._faults.labels(engine_name, kind).inc()

    def count_retry(self) -> None:
        self._retries.inc()

    def count_broken(self) -> None:
        self._broken.inc()

    def render(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        for family in (
            *self._own.collect(),
            *self._of_engines(),
            *self._of_kv(),
            *self._of_router(),
        ):
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family

    def _of_engines(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("headrace_engine_up", "1 = it may be asked", labels=["engine"])
        calls = GaugeMetricFamily(
            "headrace_engine_requests_in_flight", "requests under way at it", labels=["engine"]
        )
        for engine in self._engines:
            up.add_metric([engine.name], float(engine.is_up))
            calls.add_metric([engine.name], len(engine.calls))
        return up, calls

    def _of_kv(self) -> Iterable[Metric]:
        labels = ["engine"]
        blocks = GaugeMetricFamily("headrace_engine_kv_blocks", "that it has cached", labels=labels)
        batches, unread, gaps = (
            CounterMetricFamily(f"headrace_engine_kv_{name}", help, labels=labels)
            for name, help in (
                ("batches", "batches of KV events heard of it"),
                ("unknown_events", "of its KV events, that could not be made use of"),
                ("gaps", "times that batches were missed and could not be had again"),
            )
        )
        for (name, cache), feed in zip(self._kv.caches.items(), self._kv.feeds, strict=True):
            blocks.add_metric([name], cache.blocks.num_blocks)
            batches.add_metric([name], cache.num_batches)
            unread.add_metric([name], cache.num_unreadable + cache.blocks.num_unknown)
            gaps.add_metric([name], feed.num_gaps)
        return (blocks, batches, unread, gaps) if self._kv.caches else ()

    def _of_router(self) -> Iterable[Metric]:
        stats = self._router.stats()
        yield from (
            GaugeMetricFamily(f"headrace_router_{name}", help, value)
            for name, help, value in (
                ("waiting_requests", "requests for which no engine has room", stats.num_waiting),
                ("open_breakers", "engines cut off after failures", stats.num_open_breakers),
                ("indexed_blocks", "prefixes taken to be cached somewhere", stats.num_replicas),
            )
        )
        yield from (
            CounterMetricFamily(f"headrace_router_{name}", help, value)
            for name, help, value in (
                ("dispatched_requests", "choices of an engine", stats.num_dispatched),
                ("rejected_requests", "requests that got none", stats.num_rejected),
                ("queried_blocks", "prefixes that were looked up", stats.num_queried_blocks),
                ("hit_blocks", "of these, found at the chosen engine", stats.num_hit_blocks),
            )
        )

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"headrace_{name}", help, labels, registry=self._own)
