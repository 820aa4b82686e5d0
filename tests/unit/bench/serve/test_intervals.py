"""Intervals beside naive ones, in exact arithmetic or by counting how often they hold."""

from fractions import Fraction
from math import comb
from random import Random
from statistics import fmean

import pytest

from headrace.bench.serve.intervals import (
    Distribution,
    Estimate,
    design_effect,
    order_statistics,
    percentile_estimate,
    share_estimate,
)
from headrace.sim.summary import wilson


def chances(count: int, share: Fraction) -> list[Fraction]:
    return [comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1)]


@pytest.mark.parametrize("count", [1, 2, 9, 10, 59, 100, 299, 300])
@pytest.mark.parametrize("share", [Fraction(1, 2), Fraction(9, 10), Fraction(99, 100)])
def test_ranks_are_the_nearest_that_bound_a_quantile(count: int, share: Fraction) -> None:
    low, high = order_statistics(count, float(share))
    chance, tail = chances(count, share), Fraction(25, 1000)
    assert sum(chance[:low]) <= tail  # that the value of rank `low` is above the quantile
    assert sum(chance[high:]) <= tail  # that the value of rank `high` is below it
    assert low == count or sum(chance[: low + 1]) > tail
    assert high == 1 or sum(chance[high - 1 :]) > tail


def test_too_few_values_bound_nothing() -> None:
    assert percentile_estimate([1.0, 2.0, 3.0], 0.99) == Estimate(3.0, 2.0, None)
    assert percentile_estimate([7.0], 0.5) == Estimate(7.0, None, None)


def test_an_interval_of_the_median_holds_as_often_as_it_says() -> None:
    rng = Random(5)
    held = 0
    for _ in range(400):
        found = percentile_estimate(sorted(rng.gauss(0.0, 1.0) for _ in range(60)), 0.5)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.0 <= found.high
    assert held >= 0.93 * 400


def test_independent_requests_have_wilsons_interval() -> None:
    # Each batch of ten has the same share, as like each other as they can be.
    is_good = ([True] * 9 + [False]) * 10
    assert design_effect(is_good) == 1.0
    assert share_estimate(is_good) == Estimate(0.9, *wilson(90, 100))
    assert share_estimate([True] * 20) == Estimate(1.0, *wilson(20, 20))
    assert share_estimate([]) == Estimate(0.0, None, None)


def test_requests_that_fail_together_tell_less() -> None:
    apart = ([True] * 9 + [False]) * 20
    together = [True] * 180 + [False] * 20
    wide, narrow = share_estimate(together), share_estimate(apart)
    assert wide.value == narrow.value == 0.9
    assert wide.low is not None
    assert narrow.low is not None
    assert wide.low < narrow.low - 0.1
    # Two batches of ten are all bad: 20 · var(means) / (0.9 · 0.1), by the definition.
    means = [1.0] * 9 + [0.0]
    spread = sum((one - fmean(means)) ** 2 for one in means) / 9
    assert design_effect(together) == pytest.approx(20 * spread / 0.09)


def test_an_interval_of_a_bursty_share_holds_where_wilsons_does_not() -> None:
    """Requests are good or bad ten at a time, as in a queue that fills up and drains."""
    rng = Random(11)
    held = naive = 0
    for _ in range(300):
        is_good = [state for _ in range(60) for state in [rng.random() < 0.8] * 10]
        found = share_estimate(is_good)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.8 <= found.high
        low, high = wilson(sum(is_good), len(is_good))
        naive += low <= 0.8 <= high
    assert naive < 0.6 * 300
    assert held > 0.85 * 300


def test_a_distribution_of_nothing_and_of_something() -> None:
    assert Distribution.of([]) == Distribution(count=0)
    found = Distribution.of([3.0, 1.0, 2.0])
    assert (found.count, found.mean, found.largest) == (3, 2.0, 3.0)
    assert found.p50 is not None
    assert found.p50.value == 2.0
