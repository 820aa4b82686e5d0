"""Pictures are well-formed, keep inside their frame, and survive what charts may hold."""

from itertools import combinations
from math import inf
from xml.etree import ElementTree

import pytest

from headrace.plan.picture import HEIGHT, WIDTH, Chart, Line, Mark, Span, SpanChart

SVG = "{http://www.w3.org/2000/svg}"


def drawn(chart: Chart | SpanChart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.to_svg())


def places(root: ElementTree.Element) -> list[tuple[float, float]]:
    return [
        (float(x), float(y))
        for line in root.iter(f"{SVG}polyline")
        for x, _, y in (place.partition(",") for place in line.attrib["points"].split())
    ]


@pytest.mark.parametrize("is_log", [False, True])
def test_lines_lie_within_the_frame_and_rise(is_log: bool) -> None:
    line = Line("a < b & c", [(0.3, 2.0), (40.0, 900.0), (5000.0, 1e6)])
    chart = Chart(
        title="t", x_label="x", y_label="y", lines=[line], is_log_x=is_log, is_log_y=is_log
    )
    root = drawn(chart)
    found = places(root)
    assert len(found) == 3
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in found)
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    assert [y for _, y in found] == sorted((y for _, y in found), reverse=True)
    assert "a < b & c" in [text.text for text in root.iter(f"{SVG}text")]


def test_what_has_no_logarithm_is_left_out() -> None:
    line = Line("l", [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
    chart = Chart(title="t", x_label="x", y_label="y", lines=[line], is_log_x=True, is_log_y=True)
    assert len(places(drawn(chart))) == 1


def test_an_empty_chart_and_a_single_point_are_drawn() -> None:
    assert drawn(Chart(title="t", x_label="x", y_label="y")) is not None
    marked = drawn(Chart(title="t", x_label="x", y_label="y", marks=[Mark("m", (0.0, 0.0))]))
    assert len(list(marked.iter(f"{SVG}circle"))) == 1


def test_words_of_points_that_lie_together_do_not_cover_each_other() -> None:
    """Nor do they leave the picture, on either side."""
    points = [(0.278, 100.0), (0.278, 100.0), (0.279, 99.9), (0.306, 100.0), (0.6, 100.0)]
    points += [(0.1, 0.0), (0.1, 0.0), (0.1, 1.0), (0.11, 0.0)]
    marks = [
        Mark(f"{place} H100 SXM in chunks, least_loaded", at) for place, at in enumerate(points)
    ]
    root = drawn(Chart(title="t", x_label="x", y_label="y", marks=[*marks, Mark("", points[0])]))
    boxes = []
    for text in root.iter(f"{SVG}text"):
        if "H100" in (text.text or ""):
            left, down = float(text.attrib["x"]), float(text.attrib["y"])
            length = 7.0 * len(text.text or "")
            left -= length if text.attrib["text-anchor"] == "end" else 0.0
            boxes.append((left, left + length, down))
    assert len(boxes) == len(points)
    assert all(
        0.0 < left < right <= WIDTH and 24.0 < down <= HEIGHT - 56 for left, right, down in boxes
    )
    for (left, right, down), (other_left, other_right, other_down) in combinations(boxes, 2):
        assert right <= other_left or other_right <= left or abs(down - other_down) >= 12.0


def texts(root: ElementTree.Element) -> list[str | None]:
    return [text.text for text in root.iter(f"{SVG}text")]


def test_a_line_of_one_point_is_seen() -> None:
    root = drawn(Chart(title="t", x_label="x", y_label="y", lines=[Line("l", [(1.0, 2.0)])]))
    [circle] = root.iter(f"{SVG}circle")
    assert [(float(circle.attrib["cx"]), float(circle.attrib["cy"]))] == places(root)


def test_thousands_are_written_out_and_millions_of_millions_are_not() -> None:
    line = Line("l", [(0.0, 0.0), (20_000.0, 4e12)])
    found = texts(drawn(Chart(title="t", x_label="x", y_label="y", lines=[line])))
    assert "20,000" in found
    assert "4e+12" in found


def test_figures_stand_beside_the_ranges_that_they_are_held_against() -> None:
    spans = [
        Span(label="a", low=3.0, high=5.0, at=1.5, words="1.50 ×"),
        Span(label="b", low=2.0, high=2.0, at=8.0, words="8.00 ×"),
        Span(label="has no logarithm", low=2.0, high=2.0, at=0.0, words="0 ×"),
        Span(label="has no end", low=2.0, high=2.0, at=inf, words="inf ×"),
    ]
    chart = SpanChart(title="t", x_label="x", range_label="r", figure_label="f", spans=spans)
    root = drawn(chart)
    bars = [bar.attrib for bar in root.iter(f"{SVG}rect")][1:]  # behind the background
    ends = [(float(bar["x"]), float(bar["x"]) + float(bar["width"])) for bar in bars]
    dots = [float(circle.attrib["cx"]) for circle in root.iter(f"{SVG}circle")]
    assert len(ends) == len(dots) == 2
    assert dots[0] < ends[0][0] < ends[0][1] < dots[1]
    assert ends[1][1] - ends[1][0] < 10.0
    assert {"a", "b", "1.50 ×"} <= set(texts(root))
