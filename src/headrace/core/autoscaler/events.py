"""What can happen to an AutoscalerCore, and what it can ask for.

A pool is all replicas of one role; a replica is a worker, under the id that it has everywhere.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from headrace.core.base.events import CallAt, Timer
from headrace.core.base.types import Ns, WorkerId
from headrace.core.base.worker import Role

# ---- what is observed


class Quantiles(msgspec.Struct, frozen=True):
    """Milliseconds that a share of the samples did not exceed."""

    p50: float
    p90: float
    p99: float


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that serves or drains: what it has to do, and how its last requests fared.

    `queue_ms` is predicted work, as whoever dispatches books it: prefill that is due there. What an
    engine says about its own queue may stand in, and is believed less: latencies count as well.
    """

    replica_id: WorkerId
    queue_ms: float = 0.0
    num_running: int = 0  # sequences
    num_kv_tokens: int = 0  # that these hold
    num_cached_tokens: int = 0  # kept for reuse: what would be lost with the replica
    num_samples: int = 0  # requests that ended within the window
    num_good: int = 0  # those that kept every limit
    ttft_ms: Quantiles | None = None  # of the samples; None = there were none
    itl_ms: Quantiles | None = None


class PoolWindow(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool did within a span of time, and how it stands at its end.

    Windows of a pool follow each other without overlap; where one is missing, nothing is known.
    """

    role: Role
    span_ns: Ns
    age_ns: Ns = Ns(0)  # of its end, when it is told
    num_arrivals: int = 0  # requests; for a decode pool those that were handed over to it
    prompt_tokens: float = 0.0  # mean of an arrival
    output_tokens: float = 0.0  # mean of those that ended
    hit_rate: float = 0.0  # share of prompt tokens whose KV was there already
    num_waiting: int = 0  # requests that no replica has yet
    num_starting: int = 0  # replicas that were asked for and do not serve yet
    num_draining: int = 0  # replicas that are leaving, and not for another pool
    replicas: tuple[ReplicaLoad, ...] = ()


# ---- events


class Observe(msgspec.Struct, frozen=True, tag=True):
    window: PoolWindow


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Decide what is due. Needed once, to begin; afterwards a Timer does the same."""


class ReplicaUp(msgspec.Struct, frozen=True, tag=True):
    """It serves, after a start.

    Who begins to watch a fleet says this of every replica that serves, before the first Observe.
    """

    role: Role
    replica_id: WorkerId


class ReplicaDown(msgspec.Struct, frozen=True, tag=True):
    """It is gone, drained or dead. Idempotent, unknown ids included."""

    role: Role
    replica_id: WorkerId


class RoleSwitched(msgspec.Struct, frozen=True, tag=True):
    """It serves in another pool from here on, with all that it has cached: as SwitchRole has asked,
    or as somebody else has.
    """

    replica_id: WorkerId
    from_role: Role
    to_role: Role


class RequestWaiting(msgspec.Struct, frozen=True, tag=True):
    """A request waits for a pool in which nothing serves."""

    role: Role


AutoscalerEvent: TypeAlias = (
    Observe | Tick | ReplicaUp | ReplicaDown | RoleSwitched | RequestWaiting | Timer
)

# ---- effects


class Loop(StrEnum):
    """What led to a decision."""

    LOAD = "load"  # queues and steps as they are
    LATENCY = "latency"  # measured limits were missed where the cost model saw no reason
    THROUGHPUT = "throughput"  # predicted demand
    IDLE = "idle"
    WAKE = "wake"  # a request waits for a pool that sleeps
    SWITCH = "switch"  # the other pool could spare one
    REPLACE = "replace"  # a replica went that nobody had asked to go
    LIMITS = "limits"  # the configured minimum, or the budget


class Constraint(StrEnum):
    """What a replica runs out of first."""

    TTFT = "ttft"
    ITL = "itl"
    RATE = "rate"  # its throughput, less the margin
    SEQS = "seqs"  # sequences at once
    KV = "kv"


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What the cost model says of so many replicas under so many requests."""

    num_replicas: int
    rate_per_s: float  # requests to all of them
    utilisation: float  # of their throughput
    ttft_ms: float  # at the configured percentile
    itl_ms: float
    pressure: float  # largest of figure by limit; above 1 the limits are missed
    constraint: Constraint  # whose figure that is


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    loop: Loop
    num_wanted: int  # replicas, before the budget and the most that one decision may change
    is_limited: bool = False  # by the budget: more were wanted than there may be
    forecast: Forecast | None = None  # with the replicas there will be
    forecast_before: Forecast | None = None  # with those there were
    predictor: str = ""  # that predicted the rate


class Scale(msgspec.Struct, frozen=True, tag=True):
    """There shall be that many replicas, those that drain not counted. Idempotent.

    Whoever carries it out starts what is missing. Where there are too many, Drain has named before
    those that serve and leave; what is still beyond the number has not come up, and need not.
    """

    role: Role
    num_replicas: int
    reason: Reason


class Drain(msgspec.Struct, frozen=True, tag=True):
    """No new requests; those that it has end in peace, then it goes."""

    role: Role
    replica_id: WorkerId
    reason: Reason


class SwitchRole(msgspec.Struct, frozen=True, tag=True):
    """It shall serve in the other pool from now on; what it has begun ends there. RoleSwitched says
    that it does.

    Both pools' numbers change by one with it; no Scale says so. Should it go before, ReplicaDown
    says that, and the other pool has to have another one.
    """

    replica_id: WorkerId
    from_role: Role
    to_role: Role
    reason: Reason  # of the pool that gets it


AutoscalerEffect: TypeAlias = Scale | Drain | SwitchRole | CallAt
