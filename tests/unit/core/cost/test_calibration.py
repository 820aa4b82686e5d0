"""Lines are fitted, extrapolation is told, and figures that cannot be are refused."""

from typing import Any

import pytest

from headrace.core.cost.calibration import Host, Line, Residuals
from headrace.core.cost.model import StepShape
from support.calibrations import calibration_of


def test_a_line_through_points() -> None:
    line = Line.fit([(10, 5010.0), (20, 5020.0), (40, 5040.0)])
    assert (line.fixed_ns, line.each_ns) == pytest.approx((5000.0, 1.0))
    assert line.at(100) == 5100


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], (0.0, 0.0)),
        ([(8, 30.0), (8, 50.0)], (40.0, 0.0)),  # numbers that do not differ
        ([(1, 50.0), (9, 30.0)], (40.0, 0.0)),  # more would cost less
        ([(10, 1.0), (20, 30.0)], (0.0, 15.5 / 15)),  # nothing would cost less than nothing
    ],
)
def test_a_line_never_falls_nor_starts_below_zero(
    points: list[tuple[int, float]], expected: tuple[float, float]
) -> None:
    line = Line.fit(points)
    assert (line.fixed_ns, line.each_ns) == pytest.approx(expected)


def test_what_lies_beyond_is_told_with_both_figures() -> None:
    seen = StepShape(100, 8, 8, 5000, 900)
    assert seen.beyond(seen) == []
    assert StepShape(105, 2, 2, 10, 901).beyond(seen) == []
    assert StepShape(106, 2, 2, 10, 1901).beyond(seen) == [
        "steps of 106 tokens: seen up to 100",
        "steps of 1,901 kv tokens: seen up to 900",
    ]


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("format", "hrcost0", "hrcost0"),
        ("slow_down", (), "slow_down"),
        ("slow_down", (1.0, float("nan")), "slow_down"),
        ("slow_down", (1.0, 0.0), "slow_down"),
        ("slow_down_large", (1.0, 2.0, 3.0), "slow_down_large"),
        ("residuals", Residuals(decode=(1.0, float("nan"))), "a residual is nan"),
        ("residuals", Residuals(mixed=(0.0,)), "a residual is 0"),
        ("residuals", Residuals(run_steps=0), "run_steps"),
        ("host", Host(token_ns=-1.0), "host"),
        ("host", Host(request=Line(float("inf"), 0.0)), "host"),
        ("num_workers", 0, "num_workers"),
    ],
)
def test_figures_that_cannot_be_are_refused(field: str, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        calibration_of(**{field: value})
