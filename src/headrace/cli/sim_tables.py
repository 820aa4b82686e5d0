"""Tables of two ways to serve the same requests."""

from collections.abc import Mapping, Sequence
from typing import Final

from rich.table import Table

from headrace.cli.output import report_note
from headrace.cli.plan_answer import right_aligned
from headrace.sim.compare import Compared, Misses
from headrace.sim.doubts import Doubts

# Names of figures, and how many decimals their tables have.
_ROWS: Final = {
    "goodput_per_s": ("goodput, requests/s", 3),
    "attainment": ("attainment, %", 2),
    "refused_share": ("refused, %", 2),
    "output_tokens_per_s": ("output, tokens/s", 1),
    "hit_rate": ("prompt found in caches, %", 2),
    "worker_hours": ("worker hours", 4),
    "worker_hours_per_million_good_tokens": ("worker hours per 1M good tokens", 4),
    "cost_usd": ("cost, $", 4),
    "cost_usd_per_million_good_tokens": ("cost per 1M good tokens, $", 4),
}
_LATENCIES: Final = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "longest ITL", "e2e_ms": "E2E"}
_PARTS: Final = ("mean", "p50", "p90", "p99")
_SHARES: Final = ("attainment", "refused_share", "hit_rate")  # shown in percent


def figure_table(
    title: str,
    found: Mapping[str, Compared],
    columns: Sequence[str],
    first: Mapping[str, float | None] | None = None,
) -> Table:
    """`columns` are those of before and after, behind that of `first` where there is one."""
    table = right_aligned(title, "", *columns, "difference", "", "95 % interval")
    for name, one in found.items():
        label, decimals = _label(name)
        scale = 100.0 if name in _SHARES else 1.0
        values = (
            [one.before, one.after] if first is None else [first.get(name), one.before, one.after]
        )
        if values[-2:] == [None, None]:
            continue
        table.add_row(
            label,
            *(_shown(value, scale, decimals) for value in values),
            _signed(one.difference, scale, decimals),
            _relative(one),
            _interval(one, scale, decimals),
        )
    return table


def miss_table(found: Sequence[Misses], columns: tuple[str, str]) -> Table:
    table = right_aligned(
        "why limits were missed", "limit", "cause", *columns, "difference", num_left=2
    )
    for one in found:
        table.add_row(
            one.metric.upper(),
            one.cause.replace("_", " "),
            f"{one.before:g}",
            f"{one.after:g}",
            f"{one.after - one.before:+g}",
        )
    return table


def report_doubts(doubts: Doubts) -> None:
    for warning in doubts.warnings:
        report_note(f"warning: {warning}")
    for facts in doubts.steps:
        report_note(f"recorded: {facts}")


def _label(name: str) -> tuple[str, int]:
    if name in _ROWS:
        return _ROWS[name]
    latency, _, part = name.rpartition("_")
    return f"{_LATENCIES[latency]} {part}, ms", 2


def _shown(value: float | None, scale: float, decimals: int) -> str:
    return "" if value is None else f"{value * scale:,.{decimals}f}"


def _signed(value: float | None, scale: float, decimals: int) -> str:
    return "" if value is None else f"{value * scale:+,.{decimals}f}"


def _relative(one: Compared) -> str:
    if not one.before or one.difference is None:
        return ""
    return f"{one.difference / abs(one.before):+.1%}"


def _interval(one: Compared, scale: float, decimals: int) -> str:
    if one.low is None or one.high is None:
        return ""
    return f"{one.low * scale:+,.{decimals}f} to {one.high * scale:+,.{decimals}f}"
