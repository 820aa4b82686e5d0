"""What the latencies and goodput mean: the one definition, for whatever reports a figure.

TTFT  time to first token: arrival at the server to the first token sent
ITL   inter-token latency: the gap between one token and the next
TPOT  time per output token: (E2E - TTFT) / (output tokens - 1)
E2E   arrival at the server to the last token sent
Goodput: requests per second that met every limit stated for them.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from math import ceil
from typing import Protocol

import msgspec

from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns


class Metric(StrEnum):
    """A latency that an Slo may limit."""

    TTFT = "ttft"
    ITL = "itl"
    TPOT = "tpot"
    E2E = "e2e"


class Excess(msgspec.Struct, frozen=True):
    """A stated limit and what it was exceeded by."""

    metric: Metric
    limit_ns: float
    actual_ns: float


class Served(Protocol):
    """What a request is judged by, whoever measured it. None = there was no such interval."""

    @property
    def reason(self) -> FinishReason: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def ttft_ns(self) -> Ns | None: ...
    @property
    def max_itl_ns(self) -> Ns | None: ...
    @property
    def tpot_ns(self) -> float | None: ...
    @property
    def e2e_ns(self) -> Ns: ...


def ttft_ns(arrived_ns: Ns, first_token_ns: Ns) -> Ns:
    return Ns(first_token_ns - arrived_ns)


def e2e_ns(arrived_ns: Ns, finished_ns: Ns) -> Ns:
    return Ns(finished_ns - arrived_ns)


def itl_ns(token_times_ns: Iterable[Ns]) -> list[Ns]:
    """The gaps between tokens sent at these times; tokens sent together have gaps of 0."""
    return [Ns(after - before) for before, after in pairwise(token_times_ns)]


def tpot_ns(e2e: Ns, ttft: Ns, num_output_tokens: int) -> float | None:
    """Mean time per token after the first; a single token has none."""
    return (e2e - ttft) / (num_output_tokens - 1) if num_output_tokens > 1 else None


def find_excesses(served: Served, slo: Slo) -> list[Excess]:
    """The stated limits that were exceeded.

    Every gap must keep the ITL limit, so the worst one is compared. A request that never had a
    token has waited for it at least until its end.
    """
    actual_ns = {
        Metric.TTFT: (slo.ttft_ms, served.e2e_ns if served.ttft_ns is None else served.ttft_ns),
        Metric.ITL: (slo.itl_ms, served.max_itl_ns),
        Metric.TPOT: (slo.tpot_ms, served.tpot_ns),
        Metric.E2E: (slo.e2e_ms, served.e2e_ns),
    }
    return [
        Excess(metric, limit_ms * NS_PER_MS, actual)
        for metric, (limit_ms, actual) in actual_ns.items()
        if limit_ms is not None and actual is not None and actual > limit_ms * NS_PER_MS
    ]


def is_good(served: Served, slo: Slo) -> bool:
    """Whether the request got tokens, did not fail, and met every limit stated for it.

    CANCELLED may be good: a client that leaves early has had, so far, what it was promised.
    """
    return has_answer(served) and not find_excesses(served, slo)


def has_answer(served: Served) -> bool:
    """Whether it is good if it met every limit."""
    return (
        served.reason not in (FinishReason.ERROR, FinishReason.DEADLINE)
        and served.num_output_tokens > 0
    )


def per_second(count: float, duration_ns: Ns) -> float:
    """A rate; goodput is that of the good requests."""
    return count * NS_PER_S / duration_ns if duration_ns > 0 else 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the values that at least a `share` of them do not exceed (nearest rank).

    `ordered` is sorted and not empty; 0 < share <= 1.
    """
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
