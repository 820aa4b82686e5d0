"""What comes next in a series of equally spaced values, such as requests per second.

Decides nothing about replicas. Every predictor takes one value after another, None where one is
missing, and predicts any number of steps ahead; a prediction changes nothing.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Final, Protocol

from headrace.core.config.autoscaler import AutoscalerConfig

LEVEL_WEIGHT: Final = 0.5  # of a new value
TREND_WEIGHT: Final = 0.1
SEASON_WEIGHT: Final = 0.3
# A trend is believed less the farther it reaches: it is damped by that much with each step.
DAMPING: Final = 0.9
# Of a new error, in the mean by which predictors are compared.
ERROR_WEIGHT: Final = 0.1
# A place of a season is predicted from that many neighbours on each side too: one value is noise.
SEASON_REACH: Final = 3
# Memory is bounded: a longer season is cut.
MAX_SEASON_STEPS: Final = 16_384


class Predictor(Protocol):
    @property
    def name(self) -> str: ...

    def add(self, value: float | None) -> None:
        """The next value of the series; None keeps its place and tells nothing."""
        ...

    def predict(self, num_steps: int) -> float | None:
        """The value `num_steps` after the last one, never negative; None = nothing to go by."""
        ...


class ConstantPredictor:
    """It stays as it is: exponential smoothing (Brown 1959)."""

    name = "constant"

    def __init__(self) -> None:
        self._level: float | None = None

    def add(self, value: float | None) -> None:
        if value is not None:
            level = value if self._level is None else self._level
            self._level = level + LEVEL_WEIGHT * (value - level)

    def predict(self, num_steps: int) -> float | None:
        return self._level


class TrendPredictor:
    """It goes on as it went: Holt's linear method (1957), damped (Gardner and McKenzie 1985)."""

    name = "trend"

    def __init__(self) -> None:
        self._level: float | None = None
        self._trend = 0.0

    def add(self, value: float | None) -> None:
        if self._level is None:
            self._level = value
            return
        expected = self._level + DAMPING * self._trend
        level = expected if value is None else expected + LEVEL_WEIGHT * (value - expected)
        self._trend = (1 - TREND_WEIGHT) * DAMPING * self._trend + TREND_WEIGHT * (
            level - self._level
        )
        self._level = level

    def predict(self, num_steps: int) -> float | None:
        if self._level is None:
            return None
        reach = DAMPING * (1 - DAMPING**num_steps) / (1 - DAMPING)
        return max(0.0, self._level + reach * self._trend)


class SeasonalPredictor:
    """It comes as it came a season ago, and as much above or below as lately.

    Additive seasons of Holt and Winters (1960), without a trend. Before a whole season has passed
    it is taken to stay as it is; places of the season that were never seen are taken for its mean.
    """

    name = "seasonal"

    def __init__(self, season_steps: int) -> None:
        self._season_steps = season_steps
        self._until_then = ConstantPredictor()
        self._first: list[float | None] = []  # the first season, as it was
        self._offsets: list[float] = []
        self._level = 0.0
        self._place = 0  # of the next value in its season

    def add(self, value: float | None) -> None:
        if not self._offsets:
            self._until_then.add(value)
            self._first.append(value)
            if len(self._first) == self._season_steps:
                self._begin()
            return
        offset = self._offsets[self._place]
        if value is not None:
            self._level += LEVEL_WEIGHT * (value - offset - self._level)
            self._offsets[self._place] += SEASON_WEIGHT * (value - self._level - offset)
        self._place = (self._place + 1) % self._season_steps

    def predict(self, num_steps: int) -> float | None:
        if not self._offsets:
            return self._until_then.predict(num_steps)
        middle = self._place + num_steps - 1
        reach = min(SEASON_REACH, (self._season_steps - 1) // 2)
        places = range(middle - reach, middle + reach + 1)
        offsets = [self._offsets[place % self._season_steps] for place in places]
        return max(0.0, self._level + sum(offsets) / len(offsets))

    def _begin(self) -> None:
        seen = [value for value in self._first if value is not None]
        if seen:
            self._level = sum(seen) / len(seen)
            self._offsets = [0.0 if value is None else value - self._level for value in self._first]
        self._first.clear()


class AutoPredictor:
    """Whichever of several was nearest lately, each judged by what it had said of a value when that
    was `reach_steps` ahead: one step, or as far as decisions look.
    """

    def __init__(self, candidates: Sequence[Predictor], reach_steps: int = 1) -> None:
        self._candidates = candidates
        self._reach_steps = reach_steps
        self._said: deque[list[float | None]] = deque()  # of the values to come, nearest first
        self._errors: list[float | None] = [None] * len(candidates)

    @property
    def name(self) -> str:
        return self._best().name

    def add(self, value: float | None) -> None:
        if len(self._said) == self._reach_steps:
            self._judge(value, self._said.popleft())
        for candidate in self._candidates:
            candidate.add(value)
        self._said.append([one.predict(self._reach_steps) for one in self._candidates])

    def predict(self, num_steps: int) -> float | None:
        return self._best().predict(num_steps)

    def _judge(self, value: float | None, said: list[float | None]) -> None:
        for i, predicted in enumerate(said):
            if value is not None and predicted is not None:
                error, mean = abs(predicted - value), self._errors[i]
                self._errors[i] = error if mean is None else mean + ERROR_WEIGHT * (error - mean)

    def _best(self) -> Predictor:
        """The first one until somebody was judged, and where several are equally good."""
        errors = [float("inf") if error is None else error for error in self._errors]
        return self._candidates[errors.index(min(errors))]


def build_predictor(config: AutoscalerConfig) -> Predictor:
    """The configured one, for a value in every `throughput_interval_s`."""
    interval_s = config.throughput_interval_s
    season_steps = min(MAX_SEASON_STEPS, max(2, round(config.season_s / interval_s)))
    match config.predictor:
        case "constant":
            return ConstantPredictor()
        case "trend":
            return TrendPredictor()
        case "seasonal":
            return SeasonalPredictor(season_steps)
        case _:
            known = (ConstantPredictor(), TrendPredictor(), SeasonalPredictor(season_steps))
            return AutoPredictor(known, 1 + ceil(config.start_up_s / interval_s))
