"""How far a simulation is, on standard error: a line on a terminal that is written anew each
second.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from headrace.cli.output import console
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.telemetry import RequestRecord

EVERY_S: Final = 1.0
RECORDS_PER_LOOK: Final = 64  # at the clock
ERASE: Final = "\r\x1b[K"

OnRecord = Callable[[RequestRecord], None]


def progress_words(num_done: int, num_all: int, elapsed_s: float, simulated_s: float) -> str:
    left_s = max(0.0, elapsed_s * (num_all - num_done) / max(1, num_done))
    return (
        f"{num_done:,} of {num_all:,} requests,"
        f" {simulated_s:,.0f} s simulated in {elapsed_s:,.0f} s, about {left_s:,.0f} s left"
    )


@contextmanager
def showing(on_record: OnRecord, num_all: int) -> Iterator[OnRecord]:
    """What takes records in the place of `on_record`, and shows how many there were. Nothing is
    shown where standard error is no terminal.
    """
    if not console(sys.stderr).is_terminal:
        yield on_record
        return
    began_s = shown_s = time.monotonic()
    num_done, last_ns = 0, Ns(0)

    def take(record: RequestRecord) -> None:
        nonlocal num_done, last_ns, shown_s
        on_record(record)
        num_done += 1
        last_ns = max(last_ns, record.finished_ns)
        if num_done % RECORDS_PER_LOOK:
            return
        now_s = time.monotonic()
        if now_s - shown_s >= EVERY_S:
            shown_s = now_s
            words = progress_words(num_done, num_all, now_s - began_s, last_ns / NS_PER_S)
            sys.stderr.write(ERASE + words)
            sys.stderr.flush()

    try:
        yield take
    finally:
        sys.stderr.write(ERASE)
        sys.stderr.flush()
