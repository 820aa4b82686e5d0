"""How sure figures are: 95 % intervals of shares and of percentiles.

Requests near each other meet the same queue, so they are no independent trials. A share's interval
takes that from how much consecutive batches differ: Wilson's score interval (1927) of as many
requests as independent ones would tell as much (Kish's design effect, 1965). A percentile's
interval lies between two of the values seen (order statistics), and does take them for independent.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import exp, lgamma, log, log1p
from statistics import fmean, variance
from typing import Final

import msgspec

from headrace.core.base.metrics import percentile
from headrace.sim.summary import wilson

CONFIDENCE: Final = 0.95
NUM_BATCHES: Final = 10
SMALLEST_BATCH: Final = 5


class Estimate(msgspec.Struct, frozen=True):
    """A figure and its 95 % interval; None = there are too few values to bound it on that side."""

    value: float
    low: float | None
    high: float | None

    def scaled(self, factor: float) -> "Estimate":
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, low, high)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of values in milliseconds. All but the count are None where there are none."""

    count: int
    mean: float | None = None
    p50: Estimate | None = None
    p90: Estimate | None = None
    p99: Estimate | None = None
    largest: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution":
        if not values:
            return cls(count=0)
        ordered = sorted(values)
        p50, p90, p99 = (percentile_estimate(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(
            count=len(ordered), mean=fmean(ordered), p50=p50, p90=p90, p99=p99, largest=ordered[-1]
        )


def share_estimate(is_good: Sequence[bool]) -> Estimate:
    """The share of true ones, of values in the order of time."""
    if not is_good:
        return Estimate(0.0, None, None)
    share = fmean(is_good)
    effective = len(is_good) / design_effect(is_good)
    low, high = wilson(share * effective, effective)
    return Estimate(share, low, high)


def design_effect(is_good: Sequence[bool]) -> float:
    """How many times as many requests it takes to tell as much as independent ones would; 1 or
    more. 1 where there are too few to see.
    """
    size = len(is_good) // NUM_BATCHES
    share = fmean(is_good) if is_good else 0.0
    if size < SMALLEST_BATCH or share in (0.0, 1.0):
        return 1.0
    means = [fmean(is_good[k * size : (k + 1) * size]) for k in range(NUM_BATCHES)]
    return max(1.0, size * variance(means) / (share * (1.0 - share)))


def percentile_estimate(ordered: Sequence[float], share: float) -> Estimate:
    """`ordered` is sorted and not empty; 0 < share < 1."""
    low, high = order_statistics(len(ordered), share)
    return Estimate(
        percentile(ordered, share),
        ordered[low - 1] if low >= 1 else None,
        ordered[high - 1] if high <= len(ordered) else None,
    )


@lru_cache(maxsize=64)
def order_statistics(count: int, share: float) -> tuple[int, int]:
    """Ranks, from 1 on, between which a quantile lies with at least 95 %; 0 and count + 1 = there
    is no such value. Each end is missed with at most half of the rest.

    With B the number of values below the quantile, binomial of `count` and `share`: the value of
    rank r is not above the quantile where B >= r, and not below it where B < r.
    """
    tail = (1.0 - CONFIDENCE) / 2
    low, high, below = 0, count + 1, 0.0
    for number, chance in enumerate(_binomial(count, share)):
        if below <= tail:  # P(B < number)
            low = number
        below += chance
        if 1.0 - below <= tail:  # P(B > number), the chance that rank number + 1 is below
            high = number + 1
            break
    return low, high


def _binomial(count: int, share: float) -> Iterator[float]:
    """The chance of each number of successes from 0 to `count`."""
    whole = lgamma(count + 1)
    yes, no = log(share), log1p(-share)
    for k in range(count + 1):
        yield exp(whole - lgamma(k + 1) - lgamma(count - k + 1) + k * yes + (count - k) * no)
