"""Charts as SVG text: lines and labelled points on linear or logarithmic axes, and rows of ranges.

Decides how a chart looks; refuses to know what it is about. The text needs no library to be made
and any browser to be seen.
"""

from collections.abc import Sequence
from html import escape
from itertools import chain
from math import ceil, floor, isfinite, log10
from typing import Final

import msgspec

WIDTH, HEIGHT = 720, 440  # of what is drawn, without the legend to its right
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 48, 56
LETTER = 9  # width of a wide one in the legend
SMALL_LETTER = 7  # of most in the names of rows
TEXT_ROW = 14  # from one line of words to the next
ROW = 26  # from one span to the next
# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MOST_DIGITS = 1e7  # from there on, ticks have powers of ten
NUM_TICKS = 6  # about, on a linear axis

Point = tuple[float, float]


class Line(msgspec.Struct, frozen=True):
    label: str
    points: Sequence[Point]


class Mark(msgspec.Struct, frozen=True):
    """A point with its own words."""

    label: str
    at: Point


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """A logarithmic axis takes positive values only; what is not positive is left out there."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    marks: Sequence[Mark] = ()
    is_log_x: bool = False
    is_log_y: bool = False

    def to_svg(self) -> str:
        lines = [
            Line(line.label, [p for p in line.points if self._is_drawable(p)])
            for line in self.lines
        ]
        marks = [mark for mark in self.marks if self._is_drawable(mark.at)]
        seen = [*chain.from_iterable(line.points for line in lines), *(m.at for m in marks)]
        x = _Axis.over([p[0] for p in seen], LEFT, WIDTH - RIGHT, is_log=self.is_log_x)
        y = _Axis.over([p[1] for p in seen], HEIGHT - BOTTOM, TOP, is_log=self.is_log_y)
        body = [
            _text(LEFT, 24, self.title, size=15),
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, self.x_label, anchor="middle"),
            f'<g transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">'
            f"{_text(0, 0, self.y_label, anchor='middle')}</g>",
            *_grid(x, y),
        ]
        for place, line in enumerate(lines):
            colour = COLOURS[place % len(COLOURS)]
            path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in line.points)
            body.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            if len(line.points) == 1:
                across, down = path.split(",")
                body.append(_dot(across, down, colour))
            body.append(_text(WIDTH, TOP + 12 + 18 * place, line.label, colour=colour))
        body += _marked(marks, [(x.at(m.at[0]), y.at(m.at[1])) for m in marks], len(lines))
        width = WIDTH + LETTER * max((len(line.label) for line in lines), default=0)
        return _svg(width, HEIGHT, body)

    def _is_drawable(self, point: Point) -> bool:
        return (point[0] > 0 or not self.is_log_x) and (point[1] > 0 or not self.is_log_y)


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A range that somebody states, and a figure that is held against it."""

    label: str
    low: float
    high: float
    at: float
    words: str  # the figure's


class SpanChart(msgspec.Struct, frozen=True, kw_only=True):
    """A row for each span, on a logarithmic axis: what has no place there is left out."""

    title: str
    x_label: str
    range_label: str
    figure_label: str
    spans: Sequence[Span]

    def to_svg(self) -> str:
        spans = [span for span in self.spans if min(span.low, span.at) > 0 and isfinite(span.at)]
        names = [self.range_label, self.figure_label, *(span.label for span in spans)]
        left = LEFT + SMALL_LETTER * max(map(len, names))
        width, end = left + WIDTH - LEFT, TOP + ROW * (len(spans) + 1)
        ends = [value for span in spans for value in (span.low, span.high, span.at)]
        axis = _Axis.over(ends, left, width - LEFT, is_log=True)
        body = [
            _text(RIGHT, 24, self.title, size=15),
            _text((left + width) / 2, end + 40, self.x_label, anchor="middle"),
            _text(RIGHT, end + 18, self.range_label, colour=COLOURS[0]),
            _text(RIGHT, end + 36, self.figure_label, colour=COLOURS[1]),
        ]
        for tick in axis.ticks:
            at = axis.at(tick)
            body.append(f'<path d="M{at:.1f} {end}V{TOP}" stroke="#dddddd"/>')
            body.append(_text(at, end + 18, _shown(tick), "middle"))
        for place, span in enumerate(spans):
            top = TOP + ROW * (place + 1)
            low, high, at = axis.at(span.low), axis.at(span.high), axis.at(span.at)
            body += [
                _text(left - 8, top + 4, span.label, "end"),
                f'<rect x="{low - 2:.1f}" y="{top - 5}" width="{high - low + 4:.1f}" height="10" '
                f'fill="{COLOURS[0]}" fill-opacity="0.5"/>',
                _dot(f"{at:.1f}", str(top), COLOURS[1]),
                _text(max(high, at) + 10, top + 4, span.words, colour=COLOURS[1]),
            ]
        return _svg(width, end + BOTTOM, body)


class _Axis(msgspec.Struct, frozen=True, kw_only=True):
    """Maps values between `low` and `high` to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, *, is_log: bool) -> "_Axis":
        least, most = (min(values), max(values)) if values else (1.0, 1.0)
        if is_log:
            first, last = floor(log10(least)), ceil(log10(most))
            last = max(last, first + 1)
            ticks = tuple(10.0**power for power in range(first, last + 1))
        else:
            least = min(least, 0.0)
            step = _round_step((most - least) / NUM_TICKS or 1.0)
            ticks = tuple(
                step * i for i in range(floor(least / step), max(1, ceil(most / step)) + 1)
            )
        return cls(low=ticks[0], high=ticks[-1], start=start, end=end, is_log=is_log, ticks=ticks)

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = log10(value), log10(low), log10(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def _svg(width: float, height: float, body: Sequence[str]) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** floor(log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _grid(x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for tick in x.ticks:
        left = x.at(tick)
        parts.append(f'<path d="M{left:.1f} {y.start}V{y.end}" stroke="#dddddd"/>')
        parts.append(_text(left, y.start + 18, _shown(tick), "middle"))
    for tick in y.ticks:
        top = y.at(tick)
        parts.append(f'<path d="M{x.start} {top:.1f}H{x.end}" stroke="#dddddd"/>')
        parts.append(_text(x.start - 8, top + 4, _shown(tick), "end"))
    return parts


def _marked(marks: Sequence[Mark], places: Sequence[Point], num_lines: int) -> list[str]:
    """Points with their words, which make way for those of earlier ones: towards the middle, at the
    end of a thin line.
    """
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []  # from left to right, and how far down
    for place, (mark, (left, top)) in enumerate(zip(marks, places, strict=True)):
        colour = COLOURS[(num_lines + place) % len(COLOURS)]
        parts.append(_dot(f"{left:.1f}", f"{top:.1f}", colour))
        if not mark.label:
            continue
        length, down = SMALL_LETTER * len(mark.label), top - 6
        is_left = left + 8 + length > WIDTH and length + 8 < left
        begin = left - 8 - length if is_left else left + 8
        while any(
            begin < other_end and other_begin < begin + length and abs(down - other_down) < TEXT_ROW
            for other_begin, other_end, other_down in taken
        ):
            down += 1 if top < HEIGHT / 2 else -1
        taken.append((begin, begin + length, down))
        shift, anchor = (-8, "end") if is_left else (8, "start")
        if abs(down - top) > TEXT_ROW:
            line = f"M{left:.1f} {top:.1f}L{left + shift * 0.8:.1f} {down - 4:.1f}"
            parts.append(f'<path d="{line}" stroke="{colour}" stroke-opacity="0.5"/>')
        parts.append(_text(left + shift, down, mark.label, anchor, colour))
    return parts


def _dot(x: str, y: str, colour: str) -> str:
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>'


def _shown(tick: float) -> str:
    return f"{tick:,.0f}" if 1000 <= abs(tick) < MOST_DIGITS else f"{tick:.4g}"


def _text(
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    colour: str = "#333333",
    *,
    size: int = 12,
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(words)}</text>"
