"""How answers look: tables for people, JSON for programs, progress for those who wait.

Standard output carries answers and nothing else; progress, warnings and errors go to standard
error. Where a stream is not a terminal it gets plain text.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.core.base.names import one_line
from headrace.core.config.units import format_bytes

PLAIN_WIDTH = 250  # columns of what is no terminal: programs read lines, and nobody wraps them
HELP_WIDTH = 100
MAX_LINE = 4096  # of what may be others' words
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STAGES = {
    "fetch": "fetching the model",
    "load": "loading the model",
    "wait": "waiting for workers",
}

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in all)."""


class _Lossy:
    """Standard error that loses what it cannot take (its reader has left, the disk is full, it was
    closed): telling of work must not end the work, nor change its exit code.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """Else the buffer would fail again when Python ends, with an exit code of 120."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def console(stream: TextIO | None = None, *, plain_width: int = PLAIN_WIDTH) -> Console:
    """A console on a stream, standard output by default. On standard error nothing fails."""
    stream = sys.stdout if stream is None else stream
    is_terminal = not stream.closed and stream.isatty()
    file = cast("IO[str]", _Lossy(stream)) if stream is sys.stderr else stream
    width = None if is_terminal else plain_width
    return Console(file=file, width=width, highlight=False, soft_wrap=False)


def print_json(figures: object) -> None:
    print(json.dumps(figures, indent=2, ensure_ascii=False), flush=True)


def print_table(table: Table) -> None:
    """A table on standard output; plain text has no spaces at the ends of its lines."""
    out = console()
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def print_piece(text: str) -> None:
    """A piece of a model's text, at once. On a terminal, control characters are shown as what they
    are not: a model must not be able to drive the terminal.
    """
    if sys.stdout.isatty():
        text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
    print(text, end="", flush=True)


def report_error(text: str) -> None:
    """`error: …` on standard error; lines that begin with `hint:` keep their own word."""
    out = console(sys.stderr)
    lines = [one_line(line, MAX_LINE) for line in text.splitlines()] or ["unknown"]
    out.print(Text("error: ", "bold red") + Text(lines[0]), soft_wrap=True)
    for line in lines[1:]:
        if line.startswith("hint: "):
            out.print(Text("hint: ", "bold cyan") + Text(line[6:]), soft_wrap=True)
        else:
            out.print(Text("  - " + line), soft_wrap=True)


def report_note(text: str) -> None:
    """Lines on standard error about what goes on."""
    shown = "\n".join(one_line(line, MAX_LINE) for line in text.split("\n"))
    console(sys.stderr).print(Text(shown), soft_wrap=True)


def rewrite_line(text: str) -> None:
    """In place of the terminal's last line on standard error."""
    stream = _Lossy(sys.stderr)
    stream.write("\r\x1b[K" + text)
    stream.flush()


@contextmanager
def showing_progress() -> Iterator[Progress]:
    """A bar for each stage on a terminal; elsewhere one line when a fetch begins, since it takes
    long. May be reported to from any one thread.
    """
    out = console(sys.stderr)
    seen: dict[str, object] = {}
    if not out.is_terminal:

        def note(stage: str, done: int, total: int) -> None:
            if stage == "fetch" and stage not in seen:
                out.print(f"{STAGES[stage]} ({format_bytes(total)})")
            seen[stage] = total

        yield note
        return

    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Bars(*columns, console=out, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES.get(stage, stage), total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show


def print_facts(groups: Mapping[str, Mapping[str, str]]) -> None:
    """One table: a title for each group, and its facts by name below it."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, facts in groups.items():
        for index, (name, value) in enumerate(facts.items()):
            table.add_row(Text("" if index else title, "bold"), Text(name), Text(value))
    print_table(table)
