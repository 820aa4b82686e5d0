"""A benchmark's figures as tables for people."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from headrace.bench.serve.intervals import Distribution, Estimate
from headrace.bench.serve.report import Report
from headrace.bench.serve.results import ServeResults
from headrace.bench.serve.run import CONCURRENCY, SearchReport
from headrace.core.base.request import Slo


def tables_of(found: ServeResults) -> Iterator[Table]:
    if found.search is not None:
        yield search_table(found.search)
    if found.report is not None:
        yield head_table(found, found.report)
        yield latency_table(found.report)


def limits_text(slo: Slo) -> str:
    stated = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms, "ITL": slo.itl_ms, "E2E": slo.e2e_ms}
    words = [f"{name} {ms:g} ms" for name, ms in stated.items() if ms is not None]
    return ", ".join(words) or "none"


def head_rows(report: Report) -> Iterator[tuple[str, str]]:
    """(name, figure in words) of what a run is about."""
    due, sent = report.since_due, report.since_sent
    failed = sum(report.num_failed_by_fault.values())
    yield "requests", f"{report.num_sent} sent, {report.num_counted} counted"
    if failed:
        kinds = ", ".join(f"{num} {kind}" for kind, num in report.num_failed_by_fault.items())
        yield "failed", f"{failed}: {kinds}"
    if report.load_per_s is not None:
        yield "load", f"{report.load_per_s:.2f} requests/s"
    yield "finished", f"{report.finished_per_s:.2f} requests/s"
    if due.goodput_per_s is not None:
        yield "goodput", f"{_between(due.goodput_per_s, '.2f')} requests/s"
    yield "attainment", _shares(due.attainment)
    yield "attainment since sent", _shares(sent.attainment)
    misses = due.num_misses_by_metric.items()
    yield "limits missed", ", ".join(f"{n.upper()} {num}" for n, num in misses) or "none"
    yield "output", f"{report.output_tokens_per_s:,.1f} tokens/s"
    if report.cached_share is not None:
        yield "prompt tokens from caches", f"{report.cached_share:.1%}"
    if (server := report.server) is not None:
        facts = {
            "hit rate": server.hit_rate and f"{server.hit_rate:.1%}",
            "queue": None if server.queue_ms is None else f"{server.queue_ms:.1f} ms",
            "TTFT": None if server.ttft_ms is None else f"{server.ttft_ms:.1f} ms",
            "preempted": server.num_preemptions,
        }
        stated = [f"{name} {value}" for name, value in facts.items() if value is not None]
        yield "server's own count, means", ", ".join(stated)
    client = report.client
    loop = client.loop_lag_ms.p99
    yield (
        "client",
        f"{client.cpu_share:.0%} of a core, loop late by {loop.value if loop else 0:.1f} ms (p99), "
        f"{client.most_in_flight} in flight at most",
    )


def head_table(found: ServeResults, report: Report) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("server", f"{found.url}, {found.endpoint}, {found.model}")
    table.add_row("traffic", f"{found.traffic}; seed {found.seed}")
    table.add_row("limits", limits_text(found.slo))
    table.add_row("what counts", found.importance)
    for name, words in head_rows(report):
        table.add_row(name, words)
    return table


def latency_rows(report: Report) -> dict[str, Distribution]:
    return {
        "TTFT": report.since_due.ttft_ms,
        "TTFT since sent": report.since_sent.ttft_ms,
        "TPOT": report.tpot_ms,
        "gaps between events": report.itl_ms,
        "E2E": report.since_due.e2e_ms,
        "E2E since sent": report.since_sent.e2e_ms,
        "send lag": report.lag_ms,
    }


def latency_table(report: Report) -> Table:
    table = Table(title="latencies, ms, with 95 % intervals", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for name in LATENCY_COLUMNS:
        table.add_column(name, justify="right")
    for name, row in latency_rows(report).items():
        table.add_row(name, *latency_cells(row))
    return table


LATENCY_COLUMNS = ("count", "mean", "p50", "p90", "p99", "largest")


def latency_cells(row: Distribution) -> list[str]:
    if not row.count:
        return ["0", *[""] * (len(LATENCY_COLUMNS) - 1)]
    middle = [_between(one, ",.1f") if one else "" for one in (row.p50, row.p90, row.p99)]
    return [str(row.count), f"{row.mean or 0:,.1f}", *middle, f"{row.largest or 0:,.1f}"]


def search_unit(search: SearchReport) -> str:
    return "clients" if search.of == CONCURRENCY else "requests/s"


def search_words(search: SearchReport) -> str:
    unit = "client(s)" if search.of == CONCURRENCY else "requests/s"
    demand = f"at least {search.demanded_attainment:.0%} good"
    if search.held is None:
        lowest = "" if search.failed is None else f", not even {search.failed:.3g} {unit}"
        return f"nothing held with {demand}{lowest}"
    end = "more was not tried" if search.failed is None else f"{search.failed:.4g} did not"
    return f"{search.held:.4g} {unit} held with {demand}, {end}"


SEARCH_COLUMNS = ("requests", "good", "TTFT p99, ms", "TPOT p99, ms", "verdict")


def search_rows(search: SearchReport) -> Iterator[list[str]]:
    for trial in search.trials:
        verdict = "holds" if trial.holds else "; ".join(trial.faults) or "fails"
        yield [
            f"{trial.level:.4g}",
            str(trial.num_counted),
            _shares(trial.attainment),
            *("" if ms is None else f"{ms:,.1f}" for ms in (trial.ttft_ms_p99, trial.tpot_ms_p99)),
            "fails, cut short" if trial.is_cut_short else verdict,
        ]


def search_table(search: SearchReport) -> Table:
    table = Table(title=search_words(search), title_justify="left", box=SIMPLE_HEAD)
    table.add_column(search_unit(search))
    for name in SEARCH_COLUMNS:
        table.add_column(name, justify="right")
    for row in search_rows(search):
        table.add_row(*row)
    return table


def _between(one: Estimate, form: str) -> str:
    if one.low is None and one.high is None:
        return f"{one.value:{form}}"
    low, high = ("…" if end is None else f"{end:{form}}" for end in (one.low, one.high))
    return f"{one.value:{form}} ({low} to {high})"


def _shares(one: Estimate) -> str:
    return _between(one, ".1%")
