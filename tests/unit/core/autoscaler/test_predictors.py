from math import pi, sin

import pytest

from headrace.core.autoscaler.predictors import (
    AutoPredictor,
    ConstantPredictor,
    Predictor,
    SeasonalPredictor,
    TrendPredictor,
    build_predictor,
)
from headrace.core.config.autoscaler import AutoscalerConfig

SEASON = 96


def fed(predictor: Predictor, values: list[float | None]) -> Predictor:
    for value in values:
        predictor.add(value)
    return predictor


def season(step: int) -> float:
    return 10.0 + 5.0 * sin(2 * pi * step / SEASON)


def all_kinds() -> list[Predictor]:
    auto = AutoPredictor([ConstantPredictor(), TrendPredictor(), SeasonalPredictor(4)])
    return [ConstantPredictor(), TrendPredictor(), SeasonalPredictor(4), auto]


@pytest.mark.parametrize("predictor", all_kinds(), ids=lambda one: type(one).__name__)
def test_nothing_is_predicted_from_nothing(predictor: Predictor) -> None:
    assert fed(predictor, [None, None]).predict(1) is None


@pytest.mark.parametrize("predictor", all_kinds(), ids=lambda one: type(one).__name__)
def test_what_is_constant_stays(predictor: Predictor) -> None:
    fed(predictor, [3.0] * 20)
    assert predictor.predict(1) == pytest.approx(3.0)
    assert predictor.predict(7) == pytest.approx(3.0)


@pytest.mark.parametrize("predictor", all_kinds(), ids=lambda one: type(one).__name__)
def test_a_gap_tells_nothing(predictor: Predictor) -> None:
    fed(predictor, [3.0] * 20 + [None] * 6)
    assert predictor.predict(1) == pytest.approx(3.0)


def test_a_trend_goes_on_and_is_believed_less_the_farther() -> None:
    predictor = fed(TrendPredictor(), [float(i) for i in range(200)])
    one, ten, hundred = (predictor.predict(n) or 0.0 for n in (1, 10, 100))
    assert 195.0 < one < ten < hundred < 220.0


def test_a_falling_trend_never_becomes_negative() -> None:
    predictor = fed(TrendPredictor(), [float(40 - i) for i in range(41)])
    assert predictor.predict(50) == 0.0


def test_a_season_comes_again() -> None:
    predictor = fed(SeasonalPredictor(SEASON), [season(i) for i in range(3 * SEASON)])
    for ahead in (1, 24, 48, 72):
        assert predictor.predict(ahead) == pytest.approx(season(ahead - 1), abs=0.8)


def test_a_season_with_a_hole_is_known_as_far_as_it_was_seen() -> None:
    values: list[float | None] = [season(i) for i in range(2 * SEASON)]
    values[3] = values[SEASON + 40] = None
    predictor = fed(SeasonalPredictor(SEASON), values)
    assert predictor.predict(7) == pytest.approx(season(6), abs=0.8)


def test_a_season_without_a_value_begins_again() -> None:
    predictor = fed(SeasonalPredictor(4), [None] * 4 + [1.0, 2.0, 3.0, 2.0])
    assert predictor.predict(1) is not None


def test_auto_takes_whoever_was_nearest() -> None:
    def auto() -> AutoPredictor:
        known = (ConstantPredictor(), TrendPredictor(), SeasonalPredictor(SEASON))
        return AutoPredictor(known, reach_steps=3)

    assert fed(auto(), [5.0, 6.0, 4.0, 5.0] * 5).name == "constant"
    assert fed(auto(), [float(i) for i in range(60)]).name == "trend"
    assert fed(auto(), [season(i) for i in range(6 * SEASON)]).name == "seasonal"


@pytest.mark.parametrize("name", ["constant", "trend", "seasonal"])
def test_the_configuration_names_it(name: str) -> None:
    assert build_predictor(AutoscalerConfig(predictor=name)).name == name


def test_auto_begins_with_the_simplest() -> None:
    assert build_predictor(AutoscalerConfig()).name == "constant"
