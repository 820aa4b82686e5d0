"""A benchmark as one HTML page: figures, charts as SVG within it, nothing that is fetched."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median
from typing import Final

from headrace.bench.serve.asked import Rules
from headrace.bench.serve.outcome import Latencies, Outcome
from headrace.bench.serve.report import Report, counted_of
from headrace.bench.serve.results import ServeResults
from headrace.bench.serve.run import SearchReport
from headrace.bench.serve.tables import (
    LATENCY_COLUMNS,
    SEARCH_COLUMNS,
    head_rows,
    latency_cells,
    latency_rows,
    limits_text,
    search_rows,
    search_unit,
    search_words,
)
from headrace.core.base.metrics import percentile
from headrace.core.base.types import NS_PER_MS, NS_PER_S
from headrace.plan.picture import Chart, Line, Point

NUM_WINDOWS: Final = 40  # of a chart over time
MOST_POINTS: Final = 400  # of a line
SHOWN_LIMIT: Final = 4.0  # times the largest value, up to which a limit is drawn
_STYLE: Final = """
body { font-family: sans-serif; margin: 2em auto; max-width: 72em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .25em .9em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.bad { color: #b00020; } svg { max-width: 100%; height: auto; }
"""


def page_of(found: ServeResults, outcomes: Sequence[Outcome], rules: Rules) -> str:
    title = f"{found.model}: {found.traffic}"
    facts = found.machine
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(found.url)}, {escape(found.endpoint)}; limits: "
        f"{escape(limits_text(found.slo))} ({escape(found.importance)}); seed {found.seed}; "
        f"client on {escape(facts.cpu)}, {facts.num_cores} cores, "
        f"load {facts.load_average:.1f}</p>",
    ]
    if (search := found.search) is not None:
        body += [f"<h2>{escape(search_words(search))}</h2>", search_chart(search).to_svg()]
        body.append(_table([search_unit(search), *SEARCH_COLUMNS], search_rows(search)))
    if (report := found.report) is not None:
        body += _run(report)
        body += [chart.to_svg() for chart in run_charts(outcomes, rules)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _run(report: Report) -> Iterator[str]:
    for fault in report.faults:
        yield f'<p class="bad">not a measurement: {escape(fault)}</p>'
    for warning in report.warnings:
        yield f"<p>beware: {escape(warning)}</p>"
    yield _table(["", ""], (list(row) for row in head_rows(report)))
    rows = ([name, *latency_cells(row)] for name, row in latency_rows(report).items())
    yield "<h2>Latencies, ms, with 95 % intervals</h2>"
    yield _table(["", *LATENCY_COLUMNS], rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def run_charts(outcomes: Sequence[Outcome], rules: Rules) -> Iterator[Chart]:
    counted = [one for one in counted_of(outcomes, rules) if not one.fault]
    due = [Latencies.since(one.due_ns, one) for one in counted]
    sent = [Latencies.since(one.sent_ns, one) for one in counted]
    slo = rules.slo
    yield _distribution(
        "Time to first token",
        {
            "since due": [one.ttft_ns for one in due],
            "since sent": [one.ttft_ns for one in sent],
        },
        slo.ttft_ms,
    )
    tpot = {"TPOT": [one.tpot_ns for one in sent]}
    yield _distribution("Time per output token", tpot, slo.tpot_ms)
    yield _distribution(
        "Time to the last token",
        {
            "since due": [one.e2e_ns for one in due],
            "since sent": [one.e2e_ns for one in sent],
        },
        slo.e2e_ms,
    )
    at_s = [one.due_ns / NS_PER_S for one in counted]
    ttft_ms = [(one.ttft_ns or 0) / NS_PER_MS for one in due]
    yield Chart(
        title="Time to first token over the run",
        x_label="due, s since the start",
        y_label="ms",
        lines=over_time(list(zip(at_s, ttft_ms, strict=True))),
    )
    yield Chart(
        title="Requests under way",
        x_label="s since the start",
        y_label="requests",
        lines=[Line("", under_way(outcomes))],
    )


def search_chart(search: SearchReport) -> Chart:
    points = sorted((trial.level, trial.attainment.value) for trial in search.trials)
    return Chart(
        title="Share of good requests",
        x_label=search_unit(search),
        y_label="share of requests",
        lines=[
            Line("good", points),
            Line("demanded", [(level, search.demanded_attainment) for level, _ in points]),
        ],
    )


def _distribution(
    title: str, values_ns: dict[str, list[float | None]], limit_ms: float | None
) -> Chart:
    """How many are at most so large. A limit that is far from all of them would make them a
    point.
    """
    lines = [
        Line(name, cumulative([one / NS_PER_MS for one in values if one is not None]))
        for name, values in values_ns.items()
    ]
    largest = max((line.points[-1][0] for line in lines if line.points), default=0.0)
    if limit_ms is not None and limit_ms <= SHOWN_LIMIT * largest:
        lines.append(Line("limit", [(limit_ms, 0.0), (limit_ms, 1.0)]))
    return Chart(title=title, x_label="ms", y_label="share of requests", lines=lines)


def cumulative(values: Sequence[float]) -> list[Point]:
    ordered = sorted(values)
    num = len(ordered)
    step = max(1, num // MOST_POINTS)
    places = sorted({*range(0, num, step), num - 1}) if num else []
    return [(ordered[place], (place + 1) / num) for place in places]


def over_time(points: Sequence[Point]) -> list[Line]:
    """The median and the p99 of equal parts of the time."""
    if not points:
        return []
    begin, end = min(points)[0], max(points)[0]
    width = (end - begin) / NUM_WINDOWS or 1.0
    values_by_window: dict[int, list[float]] = {}
    for at, value in points:
        window = min(NUM_WINDOWS - 1, int((at - begin) / width))
        values_by_window.setdefault(window, []).append(value)
    parts = [
        (begin + (window + 0.5) * width, sorted(values))
        for window, values in sorted(values_by_window.items())
    ]
    return [
        Line("p50", [(at, median(values)) for at, values in parts]),
        Line("p99", [(at, percentile(values, 0.99)) for at, values in parts]),
    ]


def under_way(outcomes: Sequence[Outcome]) -> list[Point]:
    changes = sorted(
        [(one.sent_ns, 1) for one in outcomes] + [(one.ended_ns, -1) for one in outcomes]
    )
    points, num = [], 0
    for at_ns, change in changes:
        num += change
        points.append((at_ns / NS_PER_S, float(num)))
    step = max(1, len(points) // MOST_POINTS)
    return points[::step]
