"""Arrivals have the rate, the burstiness and the ramps that were asked for."""

from itertools import islice, pairwise, takewhile
from math import inf, nan
from random import Random
from statistics import fmean, pvariance

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.workload.arrivals import Arrivals


def first(arrivals: Arrivals, count: int, seed: int = 1) -> list[float]:
    return list(islice(arrivals.seconds(Random(seed)), count))


@pytest.mark.parametrize("burstiness", [0.0, 0.25, 1.0, 4.0])
def test_gaps_have_their_mean_and_their_spread(burstiness: float) -> None:
    times = first(Arrivals.steady(5.0, burstiness=burstiness), 20_000)
    gaps = [after - before for before, after in pairwise(times)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert pvariance(gaps) / fmean(gaps) ** 2 == pytest.approx(burstiness, rel=0.1, abs=1e-9)


def test_a_ramp_has_as_many_arrivals_as_its_area() -> None:
    ramp = Arrivals(rates=((10.0, 0.0), (20.0, 100.0), (30.0, 20.0)), burstiness=0.0)
    times = list(takewhile(lambda second: second < 40.0, ramp.seconds(Random(0))))
    assert min(times) > 10.0
    for begin, end, area in (
        (10.0, 15.0, 125),
        (10.0, 20.0, 500),
        (20.0, 30.0, 600),
        (30.0, 40.0, 200),
    ):
        assert sum(begin <= second < end for second in times) == pytest.approx(area, abs=2)


def test_the_seed_decides() -> None:
    arrivals = Arrivals.steady(1.0)
    assert first(arrivals, 10) == first(arrivals, 10) != first(arrivals, 10, seed=2)


def test_scaled_is_the_same_pattern_sooner() -> None:
    arrivals = Arrivals.steady(1.0)
    twice = [second / 2 for second in first(arrivals, 10)]
    assert first(arrivals.scaled(2.0), 10) == pytest.approx(twice)


@pytest.mark.parametrize(
    ("rates", "burstiness"),
    [
        ((), 1.0),
        (((0.0, 0.0),), 1.0),
        (((1.0, 1.0), (1.0, 2.0)), 1.0),
        (((0.0, 1.0),), -1.0),
        (((0.0, nan),), 1.0),
        (((0.0, 1.0), (nan, 2.0)), 1.0),
        (((0.0, inf),), 1.0),
        (((0.0, 1.0), (inf, 2.0)), 1.0),
        (((0.0, 1.0),), nan),
    ],
)
def test_what_is_no_process(rates: tuple[tuple[float, float], ...], burstiness: float) -> None:
    with pytest.raises(ConfigError):
        Arrivals(rates=rates, burstiness=burstiness)
