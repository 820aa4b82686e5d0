"""The page's charts show what a run was, beside the limits that it was judged by."""

import pytest

from headrace.bench.serve.asked import Rules
from headrace.bench.serve.intervals import share_estimate
from headrace.bench.serve.page import run_charts, search_chart
from headrace.bench.serve.run import CONCURRENCY, RATE, SearchReport, Trial
from headrace.core.base.request import Slo
from support.outcomes import outcome

# First tokens after 50 and 150 ms, further ones every 20 and 40 ms.
OUTCOMES = [outcome(0.0, [50.0, 70.0, 90.0]), outcome(1000.0, [1150.0, 1190.0, 1230.0])]


@pytest.mark.parametrize(("limit_ms", "is_drawn"), [(120.0, True), (600.0, True), (2000.0, False)])
def test_a_limit_is_drawn_where_values_come_near_it(limit_ms: float, is_drawn: bool) -> None:
    charts = {one.title: one for one in run_charts(OUTCOMES, Rules(slo=Slo(ttft_ms=limit_ms)))}
    first = {line.label: list(line.points) for line in charts["Time to first token"].lines}
    assert first["since due"] == [(50.0, 0.5), (150.0, 1.0)]
    assert first.get("limit") == ([(limit_ms, 0.0), (limit_ms, 1.0)] if is_drawn else None)
    each = {line.label: list(line.points) for line in charts["Time per output token"].lines}
    assert each == {"TPOT": [(20.0, 0.5), (40.0, 1.0)]}


def test_requests_under_way_rise_and_fall() -> None:
    *_, last = run_charts(OUTCOMES, Rules(slo=Slo()))
    [line] = last.lines
    assert [num for _, num in line.points] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(("of", "unit"), [(RATE, "requests/s"), (CONCURRENCY, "clients")])
def test_levels_of_a_search_have_their_unit_and_stand_in_order(of: str, unit: str) -> None:
    trials = [
        Trial(
            level=level,
            seed=0,
            holds=level < 2,
            is_cut_short=False,
            num_counted=4,
            attainment=share_estimate([True, True, True, level < 2]),
            ttft_ms_p99=None,
            tpot_ms_p99=None,
            faults=[],
        )
        for level in (2.0, 1.0)
    ]
    found = SearchReport(
        of=of, demanded_attainment=0.9, held=1.0, failed=2.0, is_settled=True, trials=trials
    )
    chart = search_chart(found)
    assert chart.x_label == unit
    good, demanded = chart.lines
    assert list(good.points) == [(1.0, 1.0), (2.0, 0.75)]
    assert {share for _, share in demanded.points} == {0.9}
