"""When requests come: renewal processes under a rate that changes with time.

Gaps are drawn with mean 1 and stretched by the rate (time rescaling: Brown et al. 2002), so that
bursts and ramps go together. Gaps are gamma distributed; burstiness 1 is a Poisson process.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from math import isfinite
from random import Random

import msgspec

from headrace.core.base.errors import ConfigError


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """`rates` are (second, arrivals per second), linear between and constant beyond them."""

    rates: tuple[tuple[float, float], ...]
    burstiness: float = 1.0  # squared coefficient of variation of the gaps; 0 = evenly spaced

    def __post_init__(self) -> None:
        if not all(map(isfinite, (*chain.from_iterable(self.rates), self.burstiness))):
            raise ConfigError("rates and burstiness must be finite numbers")
        if not self.rates or any(rate < 0.0 for _, rate in self.rates) or self.rates[-1][1] <= 0.0:
            raise ConfigError("rates must not be negative, and the last one more than 0")
        if any(after <= before for (before, _), (after, _) in pairwise(self.rates)):
            raise ConfigError("rates must be in the order of their times")
        if self.burstiness < 0.0:
            raise ConfigError(f"burstiness is {self.burstiness:g}", hint="it is 0 or more")

    @classmethod
    def steady(cls, rate_per_s: float, *, burstiness: float = 1.0) -> "Arrivals":
        return cls(rates=((0.0, rate_per_s),), burstiness=burstiness)

    def scaled(self, factor: float) -> "Arrivals":
        """The same pattern at another load."""
        rates = tuple((second, rate * factor) for second, rate in self.rates)
        return Arrivals(rates=rates, burstiness=self.burstiness)

    def seconds(self, rng: Random) -> Iterator[float]:
        """Times from 0 on, without end."""
        curve = _Curve(self.rates)
        done = 0.0
        while True:
            done += self._gap(rng)
            yield curve.second_of(done)

    def _gap(self, rng: Random) -> float:
        if self.burstiness == 0.0:
            return 1.0
        if self.burstiness == 1.0:
            return rng.expovariate(1.0)
        return rng.gammavariate(1.0 / self.burstiness, self.burstiness)


class _Curve:
    """The inverse of how many arrivals are expected up to a second, for figures that grow."""

    def __init__(self, rates: Sequence[tuple[float, float]]) -> None:
        first_s, first_rate = rates[0]
        self._pieces = [(0.0, first_rate, first_s, first_rate)] if first_s > 0.0 else []
        self._pieces += [(s, rate, t, other) for (s, rate), (t, other) in pairwise(rates)]
        self._last = rates[-1]
        self._next = 0  # piece
        self._done = 0.0  # expected before it

    def second_of(self, number: float) -> float:
        while self._next < len(self._pieces):
            begin, rate, end, other = self._pieces[self._next]
            within = number - self._done
            length = end - begin
            if within <= (area := (rate + other) / 2 * length):
                # rate · t + slope / 2 · t² = within, in the form that is stable for small slopes.
                slope = (other - rate) / length
                root = max(0.0, rate * rate + 2 * slope * within) ** 0.5
                return begin + (2 * within / (rate + root) if rate + root else 0.0)
            self._done += area
            self._next += 1
        begin, rate = self._last
        return max(begin, 0.0) + (number - self._done) / rate
