"""How far a benchmark is, on standard error: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.bench.serve.run import OnProgress, Progress
from headrace.cli.output import console

EVERY_S = 10.0  # a line, where there is no terminal


def words(now: Progress) -> str:
    failed = f", {now.num_failed} failed" if now.num_failed else ""
    return f"{now.num_good} good{failed}, {now.num_in_flight} under way"


@contextmanager
def showing_runs(*, shows_total: bool) -> Iterator[OnProgress]:
    """`shows_total`: the number of requests is what ends a run."""
    out = console(sys.stderr)
    if not out.is_terminal:
        yield _lines(shows_total=shows_total)
        return

    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=out, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(now: Progress) -> None:
            if now.label not in tasks:
                for old in tasks.values():
                    bars.remove_task(old)
                tasks.clear()
                total = now.num_planned if shows_total else None
                tasks[now.label] = bars.add_task(now.label or "requests", total=total, words="")
            bars.update(tasks[now.label], completed=now.num_ended, words=words(now))

        yield show


def _lines(*, shows_total: bool) -> OnProgress:
    out = console(sys.stderr)
    last_s = time.monotonic()

    def show(now: Progress) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= EVERY_S:
            last_s = time.monotonic()
            label = f"{now.label}: " if now.label else ""
            ended = f"{now.num_ended} of {now.num_planned}" if shows_total else f"{now.num_ended}"
            out.print(f"{label}{ended} ended, {words(now)}", soft_wrap=True, markup=False)

    return show
