"""Charts as SVG text: lines and labelled points on linear or logarithmic axes.

Decides how a chart looks; refuses to know what it is about. The text needs no library to be made
and any browser to be seen.
"""

from collections.abc import Sequence
from html import escape
from itertools import chain
from math import ceil, floor, log10
from typing import Final

import msgspec

WIDTH, HEIGHT = 720, 440  # of what is drawn, without the legend to its right
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 48, 56
LETTER = 9  # width of a wide one in the legend
# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
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
            body.append(_text(WIDTH, TOP + 12 + 18 * place, line.label, colour=colour))
        for place, mark in enumerate(marks):
            colour = COLOURS[(len(lines) + place) % len(COLOURS)]
            left, top = x.at(mark.at[0]), y.at(mark.at[1])
            is_right = left > (LEFT + WIDTH) * 0.6
            body.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="{colour}"/>')
            anchor, shift = ("end", -8) if is_right else ("start", 8)
            body.append(_text(left + shift, top - 6, mark.label, anchor, colour))
        width = WIDTH + LETTER * max((len(line.label) for line in lines), default=0)
        size = f'width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        return "\n".join(
            [head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"]
        )

    def _is_drawable(self, point: Point) -> bool:
        return (point[0] > 0 or not self.is_log_x) and (point[1] > 0 or not self.is_log_y)


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


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** floor(log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _grid(x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for tick in x.ticks:
        left = x.at(tick)
        parts.append(f'<path d="M{left:.1f} {y.start}V{y.end}" stroke="#dddddd"/>')
        parts.append(_text(left, y.start + 18, f"{tick:,.4g}", "middle"))
    for tick in y.ticks:
        top = y.at(tick)
        parts.append(f'<path d="M{x.start} {top:.1f}H{x.end}" stroke="#dddddd"/>')
        parts.append(_text(x.start - 8, top + 4, f"{tick:,.4g}", "end"))
    return parts


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
