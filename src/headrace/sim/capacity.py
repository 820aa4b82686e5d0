"""How much a cluster serves: the highest rate, or speed of a trace, at which a judge is content.

The same requests at every rate (common random numbers), so that more of it is only closer together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from headrace.core.base.request import Slo
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig, SchedulerConfig
from headrace.core.cost.fitted import Link
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.source import Source
from headrace.sim.cluster import Cluster, ClusterReport, simulate_cluster
from headrace.sim.setup import Device

PRECISION: Final = 0.06  # of a rate that is searched
MAX_DOUBLINGS: Final = 8


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of one kind and role. Whole prompts first are steps as large as prompts."""

    device: Device
    num_workers: int
    role: Role = Role.MIXED
    step_tokens: int = 2048
    budget: str = "fixed"
    max_seqs: int = 256
    num_gpus: int = 1  # of a worker


def serve(
    crews: Sequence[Crew],
    source: Source,
    *,
    slo: Slo,
    link_bytes_per_s: float = 50e9,
    policy: str = "least_loaded",
    on_record: Callable[[RequestRecord], None],
) -> ClusterReport:
    pools = tuple(
        crew.device.pool(
            crew.num_workers,
            crew.role,
            SchedulerConfig(
                step_tokens=crew.step_tokens, budget=crew.budget, max_running_seqs=crew.max_seqs
            ),
        )
        for crew in crews
    )
    is_split = any(crew.role is Role.PREFILL for crew in crews)
    cluster = Cluster(
        pools=pools,
        source=source,
        router=RouterConfig(policy=policy),
        front=ClusterConfig(handoff="always" if is_split else "never"),
        default_slo=slo,
    )
    link = Link(latency_ns=10_000.0, byte_ns=1e9 / link_bytes_per_s)
    return simulate_cluster(replace(cluster, link=link), on_record=on_record)


def largest_rate(is_good: Callable[[float], bool], start: float) -> float:
    """By doubling or halving from `start`, then by halving the interval in proportion. 0.0 = not
    even the smallest that was tried.
    """
    low, high = 0.0, 0.0
    rate = start
    for _ in range(MAX_DOUBLINGS):
        if is_good(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
        if low and high:
            break
    if not (low and high):
        return low
    while high / low > 1.0 + PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low


class Enough(Exception):
    """A run of which the verdict is known."""


def share_is_good(
    run: Callable[[Callable[[RequestRecord], None]], object], num_requests: int, share: float
) -> bool:
    """Whether at least a share of the requests keeps every limit; a run ends when that is out of
    reach.
    """
    left = int((1.0 - share) * num_requests + 1e-9)

    def note(record: RequestRecord) -> None:
        nonlocal left
        left -= not record.good
        if left < 0:
            raise Enough

    try:
        run(note)
    except Enough:
        return False
    return True
