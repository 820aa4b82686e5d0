import sys
import time
from itertools import count

import pytest

from headrace.cli.sim_progress import RECORDS_PER_LOOK, progress_words, showing
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from support.records import record_of


def test_words() -> None:
    assert progress_words(250, 1000, 10.0, 3600.0) == (
        "250 of 1,000 requests, 3,600 s simulated in 10 s, about 30 s left"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_a_second_on_a_terminal_only(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(0.0, 2.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    taken: list[object] = []
    with showing(taken.append, 1000) as take:
        for index in range(2 * RECORDS_PER_LOOK):
            take(record_of(SeqId(index), finished_ns=Ns(index * NS_PER_S)))
    assert len(taken) == 2 * RECORDS_PER_LOOK
    shown = capsys.readouterr().err.split("\r")
    lines = [line for line in shown if "requests" in line]
    assert len(lines) == (2 if is_terminal else 0)
    assert all("of 1,000 requests" in line for line in lines)
