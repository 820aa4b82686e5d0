"""Everything that one benchmark run measured, as JSON and as tables.

Decides which figures are shown; refuses to judge them.
"""

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.bench.install import Install
from headrace.bench.loads import LoadReport
from headrace.bench.machine import Machine
from headrace.bench.scheduler import StepOverhead


class Results(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Parts that were not asked for are absent."""

    machine: Machine
    server: str = ""
    ready_after_s: float | None = None  # process start to the first 200 of /ready
    peak_memory_bytes: int | None = None
    loads: list[LoadReport] = msgspec.field(default_factory=list)
    scheduler: list[StepOverhead] = msgspec.field(default_factory=list)
    install: Install | None = None

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def show(results: Results, console: Console) -> None:
    """Print what was measured."""
    facts = results.machine
    console.print(
        f"{facts.cpu} · {facts.num_cores} cores ({', '.join(facts.isa)}) · "
        f"{facts.memory_bytes / 2**30:.0f} GiB · load {facts.load_average:.1f} · "
        f"Python {facts.python} · headrace {facts.versions['headrace']}"
    )
    if results.ready_after_s is not None and results.peak_memory_bytes is not None:
        console.print(
            f"ready after {results.ready_after_s:.2f} s · "
            f"peak memory {results.peak_memory_bytes / 2**20:.0f} MiB"
        )
    if results.loads:
        console.print(load_table(results.loads))
    if results.scheduler:
        console.print(scheduler_table(results.scheduler))
    if results.install:
        console.print(
            f"fresh installation: {results.install.venv_bytes / 2**20:.0f} MiB in "
            f"{results.install.install_s:.0f} s, "
            f"{results.install.num_distributions} distributions, of these headrace "
            f"{results.install.headrace_bytes / 2**20:.1f} MiB"
        )


def right_aligned(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def load_table(loads: list[LoadReport]) -> Table:
    columns = ("requests", "wall s", "out tok/s", "prefill tok/s", "TTFT p50 / mean / p99 ms")
    table = right_aligned("loads", "load", *columns, "TPOT p50 / p99 ms", "cached tokens")
    for report in loads:
        ttft, tpot = report.ttft_ms, report.tpot_ms
        table.add_row(
            report.load,
            str(report.num_requests),
            f"{report.wall_s:.2f}",
            f"{report.output_tokens_per_s:.1f}",
            f"{report.prefill_tokens_per_s:.0f}",
            f"{ttft.p50:.0f} / {ttft.mean:.0f} / {ttft.p99:.0f}",
            f"{tpot.p50:.2f} / {tpot.p99:.2f}",
            f"{report.num_cached_tokens} of {report.num_prompt_tokens}",
        )
    return table


def scheduler_table(overheads: list[StepOverhead]) -> Table:
    table = right_aligned("host time of a step", "running sequences", "p50 µs", "mean µs", "p99 µs")
    for overhead in overheads:
        step = overhead.step_us
        cells = (f"{step.p50:.0f}", f"{step.mean:.0f}", f"{step.p99:.0f}")
        table.add_row(str(overhead.num_running_seqs), *cells)
    return table
