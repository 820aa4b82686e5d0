"""The two loops: how many replicas a pool needs, by its load and by the demand to come.

Decides for one pool as if it were alone; refuses to know the budget.
"""

from math import sqrt
from typing import Final, NamedTuple

from headrace.core.autoscaler.capacity import SHARES, Capacity, fewest
from headrace.core.autoscaler.events import Constraint, Loop
from headrace.core.autoscaler.pool import Measured, Pool
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns
from headrace.core.base.worker import Role

# A pool shrinks only to what would do for that much more than the demand.
DOWN_FACTOR: Final = 1.1
# A missed limit that the cost model does not explain makes work count that much more, until the
# model asks for a replica more; this fades.
STRAIN_FACTOR: Final = 1.1
MAX_STRAIN: Final = 4.0
STRAIN_HALF_LIFE_NS: Final = 3600 * NS_PER_S
# Standard errors by which a measured share must be too low.
DOUBT: Final = 2.0
# A queue may take that long in any case.
MIN_DRAIN_NS: Final = 30 * NS_PER_S
# Seconds of work by which a queue is predicted to grow in a second, at most: the model is no judge
# of such overload.
MAX_GROWTH: Final = 2.0


class Need(NamedTuple):
    num_replicas: int
    loop: Loop


def find_need(now: Ns, pool: Pool) -> Need | None:
    """What the pool needs; None = nothing can be said, so it stays as it is.

    The pool remembers what would have been enough, and since when limits are missed.
    """
    if pool.target is None:
        return None
    if pool.is_woken and pool.target == 0:
        return Need(1, Loop.WAKE)
    capacity = pool.capacity
    if not pool.is_fresh(now):
        pool.needs.clear()
        pool.over_since_ns = None
        return None
    if _is_idle(now, pool):
        return Need(0, Loop.IDLE)
    if capacity is None:
        return None
    grown = _find_growth(now, pool, capacity)
    least = _find_least(now, pool, capacity)
    enough = pool.remember_need(now, max(least, grown.num_replicas))
    if grown.num_replicas > pool.target:
        return grown
    if enough is not None and enough < pool.target and not pool.leaving:
        return Need(enough, grown.loop)
    return Need(pool.target, grown.loop)


def can_spare(now: Ns, pool: Pool) -> bool:
    """Whether one replica less would do at once, all that is known taken together."""
    capacity = pool.capacity
    if capacity is None or not pool.target or not pool.is_fresh(now) or pool.leaving:
        return False
    return max(_find_least(now, pool, capacity), pool.config.min_replicas) < pool.target


# ---- the throughput loop


def _expected(pool: Pool, horizon_ns: int) -> float:
    """Requests that are predicted to come within the horizon."""
    return (pool.demand or 0.0) * horizon_ns / NS_PER_S


def _is_idle(now: Ns, pool: Pool) -> bool:
    if pool.config.min_replicas or not pool.target or pool.idle_since_ns is None:
        return False
    is_long = now - pool.idle_since_ns >= pool.config.idle_s * NS_PER_S
    return is_long and _expected(pool, pool.lead_ns) < 1.0


def _find_growth(now: Ns, pool: Pool, capacity: Capacity) -> Need:
    """The least that both loops insist on; not more than there are if none sees a reason."""
    most = 2 * max(pool.config.max_replicas, pool.target or 0)
    demand = pool.demand or 0.0
    if not pool.target and _expected(pool, pool.lead_ns) < 1.0:
        demand = 0.0  # it may go on sleeping
    need = Need(capacity.replicas_for(demand * pool.strain, most), Loop.THROUGHPUT)
    if pool.target and need.num_replicas <= pool.target:
        load = _find_load_growth(now, pool, capacity, most)
        if load is not None:
            return load
    return need


def _find_least(now: Ns, pool: Pool, capacity: Capacity) -> int:
    """The fewest replicas that would do, for demand and present load with something to spare."""
    target = pool.target or 0
    totals = _Totals.of(now, pool, capacity)
    if pool.demand is None or totals is None:
        return target
    demand = max(pool.demand, pool.rate) * pool.strain * DOWN_FACTOR
    by_demand = capacity.replicas_for(demand, max(pool.config.max_replicas, target))
    # Consolidation: each that stays gets its share of what the others had.
    by_load = fewest(lambda n: totals.pressure(capacity, n) <= capacity.room, 1, max(1, target))
    return max(1, by_demand, by_load)


# ---- the load loop


class _Totals(NamedTuple):
    """The load of all replicas together, taken from those that are warm."""

    queue_ms: float
    num_running: float
    num_kv_tokens: float

    @staticmethod
    def of(now: Ns, pool: Pool, capacity: Capacity) -> "_Totals | None":
        loads = pool.warm_loads(now)
        if not loads:
            return None
        scale = len(pool.active) / len(loads)
        num_running = scale * sum(load.num_running for load in loads)
        waiting_ms = pool.num_waiting * capacity.prefill_work_ms(num_running / len(pool.active))
        return _Totals(
            scale * sum(load.queue_ms for load in loads) + waiting_ms,
            num_running,
            scale * sum(load.num_kv_tokens for load in loads),
        )

    def pressure(self, capacity: Capacity, num_replicas: int) -> float:
        """On each of so many replicas."""
        n = num_replicas
        return capacity.state_pressure(
            self.queue_ms / n, self.num_running / n, self.num_kv_tokens / n
        )


def _find_load_growth(now: Ns, pool: Pool, capacity: Capacity, most: int) -> Need | None:
    target = pool.target or 0
    present = _Totals.of(now, pool, capacity)
    if present is not None and _is_draining(present, pool):
        # Who is late now has waited behind a queue that more replicas would not have met any more.
        pool.forget_latencies()
    measured = pool.measured()
    totals = _at_lead(present, pool, capacity)
    # A pool that is exactly full can be no fuller, however many wait.
    is_loaded = totals is not None and totals.pressure(capacity, target) >= 1.0
    is_late = measured is not None and _misses(measured, pool, capacity)
    if not is_loaded and not is_late:
        pool.over_since_ns = None
        return None
    if pool.over_since_ns is None:
        pool.over_since_ns = now
    if now - pool.over_since_ns < pool.config.breach_s * NS_PER_S:
        return None
    if is_loaded and totals is not None:
        return Need(max(target + 1, _for_load(totals, pool, capacity, most)), Loop.LOAD)
    if measured is not None and pool.is_settled(now) and _learn(measured, pool, capacity):
        return Need(target + 1, Loop.LATENCY)
    return None


def _is_draining(present: _Totals, pool: Pool) -> bool:
    """Whether a queue that alone may make requests late has become shorter since the last look."""
    before, pool.queue_ms = pool.queue_ms, present.queue_ms / len(pool.active)
    return pool.queue_ms < before and before > (pool.slo.ttft_ms or 0.0) / 2


def _at_lead(totals: _Totals | None, pool: Pool, capacity: Capacity) -> _Totals | None:
    """The load when a replica asked for now would serve: one that comes after the queue has gone
    helps nobody.
    """
    if totals is None:
        return None
    num_replicas = max(1, pool.target or 0)  # those that are starting help too
    rate = pool.rate * pool.strain / capacity.room
    utilisation = capacity.forecast(rate, num_replicas).utilisation
    growth = min(utilisation - 1.0, MAX_GROWTH)
    queue_ms = totals.queue_ms + growth * num_replicas * pool.lead_ns / NS_PER_MS
    return totals._replace(queue_ms=max(0.0, queue_ms))


def _for_load(totals: _Totals, pool: Pool, capacity: Capacity, most: int) -> int:
    """Enough for what runs, for what comes, and to be rid of the queue in the time of a start."""
    running = totals._replace(queue_ms=0.0)
    by_state = fewest(lambda n: running.pressure(capacity, n) <= capacity.room, 1, most)
    work_ms = capacity.prefill_work_ms(totals.num_running / max(1, len(pool.active)))
    backlog = totals.queue_ms / work_ms if work_ms else 0.0
    drain_s = max(pool.lead_ns, MIN_DRAIN_NS) / NS_PER_S
    return max(by_state, capacity.replicas_for((pool.rate + backlog / drain_s) * pool.strain, most))


def _misses(measured: Measured, pool: Pool, capacity: Capacity) -> bool:
    """Whether limits are missed that more replicas could keep."""
    # A request that two pools served may have missed the other one's limit.
    if pool.role == Role.MIXED and not capacity.unreachable:
        share, n = SHARES[pool.config.percentile], measured.num_samples
        return measured.attainment < share - DOUBT * sqrt(share * (1.0 - share) / n)
    figures = (
        (Constraint.TTFT, measured.ttft_ms, pool.slo.ttft_ms),
        (Constraint.ITL, measured.itl_ms, pool.slo.itl_ms),
    )
    return any(
        limit_ms is not None and figure_ms > limit_ms and constraint not in capacity.unreachable
        for constraint, figure_ms, limit_ms in figures
    )


def _learn(measured: Measured, pool: Pool, capacity: Capacity) -> bool:
    """Take the work for harder, if the cost model has no other explanation; True if it was."""
    target = pool.target or 0
    rate, strain = measured.peak_rate, pool.strain
    if capacity.replicas_for(rate * strain, target + 1) > target:
        return False  # explained: as soon as there may be more, there will
    while capacity.replicas_for(rate * strain, target + 1) <= target:
        strain *= STRAIN_FACTOR
        if strain > MAX_STRAIN:
            return False
    pool.strain = strain
    pool.over_since_ns = None
    return True


def fade_strain(pool: Pool, elapsed_ns: int) -> None:
    pool.strain = 1.0 + (pool.strain - 1.0) * 0.5 ** (elapsed_ns / STRAIN_HALF_LIFE_NS)
