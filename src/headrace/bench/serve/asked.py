"""What is asked of a benchmark: whom, with what traffic, and how it is judged."""

from collections.abc import Mapping
from math import ceil
from typing import Any, Final

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.traces import TraceRequest

CHAT, COMPLETIONS = "chat", "completions"
PATHS: Final = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and how it is asked. `url` has no path."""

    url: str
    model: str
    endpoint: str = CHAT
    api_key: str = ""
    extra_body: Mapping[str, Any] = {}
    asks_usage: bool = True
    reuses_connections: bool = True
    timeout_s: float = 600.0
    max_in_flight: int = 4096

    @property
    def headers(self) -> dict[str, str]:
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"content-type": "application/json", **key}


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a profile, or of a trace where there is one, and when they are sent.

    One of three: at times of their own (`arrivals`, or a trace's), by `concurrency` clients who
    each wait for their answer, or all at once.
    """

    profile: WorkloadProfile
    trace: tuple[TraceRequest, ...] = ()
    speed: float = 1.0  # of a trace's times
    arrivals: Arrivals | None = None
    concurrency: int = 0
    is_burst: bool = False
    num_requests: int = 200
    duration_s: float | None = None  # after which none is sent
    think_s: float | None = None  # between an answer and the next; None = the profile's pause
    max_tokens: int = 1 << 17  # of a prompt and its answer
    seed: int = 0

    @property
    def is_closed(self) -> bool:
        return self.concurrency > 0

    @property
    def num_planned(self) -> int:
        """Requests if no session ends early."""
        if self.trace:
            return min(self.num_requests, len(self.trace))
        turns = self.profile.turns
        return ceil(self.num_requests / turns) * turns

    @property
    def trace_rate_per_s(self) -> float:
        """Of the trace's own times."""
        span_s = self.trace[-1].arrival_s - self.trace[0].arrival_s
        if span_s <= 0.0:
            raise ConfigError("all requests of the trace have the same time")
        return (len(self.trace) - 1) / span_s

    def at_rate(self, rate_per_s: float, seed: int) -> "Traffic":
        """The same kind of traffic as often as this, from another seed."""
        if self.trace:
            speed = rate_per_s / self.trace_rate_per_s
            return msgspec.structs.replace(self, speed=speed, seed=seed)
        burstiness = 1.0 if self.arrivals is None else self.arrivals.burstiness
        arrivals = Arrivals.steady(rate_per_s, burstiness=burstiness)
        return msgspec.structs.replace(self, arrivals=arrivals, seed=seed)

    def at_concurrency(self, concurrency: int, seed: int) -> "Traffic":
        return msgspec.structs.replace(self, concurrency=concurrency, seed=seed)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is judged."""

    slo: Slo
    attainment: float = 0.9  # share of good requests that a search demands
    warm_up_s: float = 0.0  # requests due before are sent and not counted
    max_lag_ms: float = 50.0  # a run whose p99 of send lag is more is no measurement
