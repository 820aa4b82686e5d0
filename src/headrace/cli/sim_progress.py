"""How far a simulation is, on standard error: a line on a terminal that is written anew each
second, elsewhere a line now and then.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from headrace.cli.output import console, report_note, rewrite_line
from headrace.core.base.types import NS_PER_S, Ns
from headrace.sim.progress import Seen

EVERY_S: Final = 1.0
NOTE_EVERY_S: Final = 10.0  # where there is no terminal
SEEN_PER_LOOK: Final = 64  # at the clock


def progress_words(
    num_done: int, num_all: int, elapsed_s: float, simulated_s: float, of: str = "requests"
) -> str:
    words = (
        f"{num_done:,} of {num_all:,} {of}, {simulated_s:,.0f} s simulated in {elapsed_s:,.0f} s"
    )
    if num_done < SEEN_PER_LOOK:
        return words  # too few to tell how long the others take
    left_s = max(0.0, elapsed_s * (num_all - num_done) / num_done)
    return f"{words}, about {left_s:,.0f} s left"


class _Told:
    """When the last line was written: one for all runs, or many short ones would be silent."""

    at_s = time.monotonic()


@contextmanager
def showing(label: str, num_all: int, *, of: str = "requests") -> Iterator[Seen]:
    """What is told the time of each request that ends, and shows how many have ended, after
    `label`.
    """
    is_terminal = console(sys.stderr).is_terminal
    every_s = EVERY_S if is_terminal else NOTE_EVERY_S
    began_s = time.monotonic()
    num_done, last_ns = 0, Ns(0)

    def seen(at_ns: Ns) -> None:
        nonlocal num_done, last_ns
        num_done += 1
        last_ns = max(last_ns, at_ns)
        if num_done > 1 and num_done % SEEN_PER_LOOK:
            return
        now_s = time.monotonic()
        if now_s - _Told.at_s < every_s:
            return
        _Told.at_s = now_s
        words = progress_words(num_done, num_all, now_s - began_s, last_ns / NS_PER_S, of)
        line = f"{label}: {words}" if label else words
        if is_terminal:
            rewrite_line(line)
        else:
            report_note(line)

    try:
        yield seen
    finally:
        if is_terminal:
            rewrite_line("")
