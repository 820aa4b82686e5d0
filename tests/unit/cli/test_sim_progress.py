import sys
import time
from itertools import count
from pathlib import Path

import pytest

from headrace.cli import sim_progress
from headrace.cli.sim_progress import SEEN_PER_LOOK, progress_words, showing
from headrace.core.base.types import NS_PER_S, Ns


def test_words() -> None:
    assert progress_words(250, 1000, 10.0, 3600.0) == (
        "250 of 1,000 requests, 3,600 s simulated in 10 s, about 30 s left"
    )


@pytest.mark.parametrize(("is_terminal", "look_s"), [(True, 2.0), (False, 6.0)])
def test_a_line_a_second_on_a_terminal_and_every_ten_elsewhere(
    is_terminal: bool,
    look_s: float,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = count(0.0, look_s)
    monkeypatch.setattr(sim_progress._Told, "at_s", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with showing("as asked", 1000) as seen:
        for index in range(4 * SEEN_PER_LOOK):
            seen(Ns(index * NS_PER_S))
    shown = capsys.readouterr().err
    lines = [line for line in shown.replace("\r", "\n").split("\n") if "requests" in line]
    assert len(lines) == (5 if is_terminal else 2)
    assert all("as asked: " in line and "of 1,000 requests" in line for line in lines)
    assert ("\x1b" in shown) == is_terminal


def test_short_runs_are_told_of_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(0.0, 2.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sim_progress._Told, "at_s", 0.0)
    for number in range(10):  # of 4 s each
        with showing(f"run {number}", 9) as seen:
            seen(Ns(NS_PER_S))
    assert capsys.readouterr().err.splitlines() == [
        f"run {number}: 1 of 9 requests, 1 s simulated in 2 s" for number in (2, 5, 8)
    ]


def test_who_is_quick_says_nothing_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_progress._Told, "at_s", time.monotonic())
    with showing("", 1000) as seen:
        for index in range(1000):
            seen(Ns(index))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_simulation_goes_on_where_nobody_can_be_told(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(0.0, 20.0)
    monkeypatch.setattr(sim_progress._Told, "at_s", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        monkeypatch.setattr(full, "isatty", lambda: is_terminal)
        with showing("", 1000) as seen:
            for index in range(4 * SEEN_PER_LOOK):
                seen(Ns(index))
        monkeypatch.undo()
