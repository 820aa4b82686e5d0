"""Everything that one benchmark run measured, as JSON and as tables.

Decides which figures are shown; refuses to judge them.
"""

import msgspec
from rich.box import SIMPLE_HEAD
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
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def load_table(loads: list[LoadReport]) -> Table:
    rates = ("wall s", "out tok/s", "prefill tok/s")
    table = right_aligned("loads", "load", *rates, "TTFT ms", "mean", "TPOT ms", "cached")
    for report in loads:
        table.add_row(
            report.load,
            f"{report.wall_s:.2f}",
            f"{report.output_tokens_per_s:.1f}",
            f"{report.prefill_tokens_per_s:.0f}",
            f"{report.ttft_ms.p50:.0f}",
            f"{report.ttft_ms.mean:.0f}",
            f"{report.tpot_ms.p50:.2f}",
            f"{report.num_cached_tokens / report.num_prompt_tokens:.0%}",
        )
    return table


def scheduler_table(overheads: list[StepOverhead]) -> Table:
    table = right_aligned("host time of a step", "running sequences", "p50 µs", "mean µs", "p99 µs")
    for overhead in overheads:
        step = overhead.step_us
        cells = (f"{step.p50:.0f}", f"{step.mean:.0f}", f"{step.p99:.0f}")
        table.add_row(str(overhead.num_running_seqs), *cells)
    return table
