"""How answers of `headrace plan` are given: tables or JSON, a picture, warnings, sources."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from headrace.cli.output import print_json, print_table, report_note
from headrace.cli.plan_flags import AnswerFlags
from headrace.core.base.errors import ConfigError
from headrace.models.files import check_writable
from headrace.plan.engines import Provenance
from headrace.plan.picture import Chart, SpanChart


def check_plot(answer: AnswerFlags) -> None:
    """Before anything is computed. Raises ConfigError for a picture that is not SVG, or that cannot
    be written.
    """
    if not answer.plot:
        return
    path = Path(answer.plot).expanduser()
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"cannot draw {answer.plot}", hint="pictures are SVG: name a FILE.svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: cannot be written: {reason}") from None
    check_writable(path)


def give(
    figures: msgspec.Struct | dict[str, Any],
    tables: Iterable[Table],
    chart: Chart | SpanChart,
    answer: AnswerFlags,
    *,
    warnings: Sequence[str] = (),
    provenance: Provenance | None = None,
) -> int:
    """Figures are printed in full precision as JSON, or rounded as tables.

    Warnings are part of the figures, and go to standard error where only tables are printed.
    """
    if answer.json:
        print_json(msgspec.to_builtins(figures))
    else:
        for table in tables:
            print_table(table)
        for warning in warnings:
            report_note(f"warning: {warning}")
        if provenance is not None:
            report_provenance(provenance)
    if answer.plot:
        path = Path(answer.plot).expanduser()
        path.write_text(chart.to_svg(), encoding="utf-8")
        report_note(f"written to {path}")
    return 0


def report_provenance(provenance: Provenance) -> None:
    report_note(f"from: {provenance.kind}")
    for source in provenance.sources:
        report_note(f"  {source}")
    for beyond in provenance.extrapolates:
        report_note(f"extrapolates: {beyond}")


def right_aligned(title: str, *columns: str, num_left: int = 1) -> Table:
    """A table whose first columns name the row."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < num_left else "right")
    return table


def short(number: float) -> str:
    """Three figures and a power of ten in words: 16.1k, 2.29P."""
    for scale, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * scale:
            return f"{figures(number / scale)}{unit}"
    return figures(number)


def figures(number: float) -> str:
    """Three figures, and of what has more before the point all: 0.0168, 7.82, 1,342."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:,.0f}"


def gigabytes(num_bytes: float) -> str:
    """GB, and less where it would be a small part of one."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.1 * scale:
            return f"{figures(num_bytes / scale)} {unit}"
    return f"{figures(num_bytes)} B"


def tenths(number: float) -> str:
    """One decimal: 7.8, 16.1k."""
    return f"{number:.1f}" if number < 999.95 else f"{number / 1000:,.1f}k"


def seconds(value_s: float) -> str:
    """As people read it: 42.7 ms, 2.32 s."""
    if value_s < 0.0009995:
        return f"{value_s * 1e6:.3g} µs"
    return f"{value_s * 1000:.3g} ms" if value_s < 0.9995 else f"{value_s:,.2f} s"
