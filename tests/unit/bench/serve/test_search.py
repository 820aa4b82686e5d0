"""The search against a server that is a formula."""

from random import Random

import pytest

from headrace.bench.serve.search import TOLERANCE, Search


def run(search: Search, knee: float) -> list[float]:
    levels = []
    while (level := search.next_level()) is not None:
        levels.append(level)
        search.tell(level, holds=level <= knee)
    return levels


@pytest.mark.parametrize("seed", range(30))
def test_the_bracket_holds_the_knee(seed: int) -> None:
    rng = Random(seed)
    knee = 10.0 ** rng.uniform(-2, 4)
    search = Search(10.0 ** rng.uniform(-1, 2), num_trials=40)
    run(search, knee)
    assert search.is_settled
    assert search.held is not None
    assert search.failed is not None
    assert search.held <= knee < search.failed <= search.held * (1 + TOLERANCE) * 1.0001


@pytest.mark.parametrize("knee", [1, 2, 3, 7, 8, 9, 20, 100])
def test_whole_levels(knee: int) -> None:
    search = Search(8, num_trials=40, is_whole=True)
    levels = run(search, knee)
    assert all(level == int(level) >= 1 for level in levels)
    assert len(levels) == len(set(levels))
    assert search.held is not None
    assert search.failed is not None
    assert search.held <= knee < search.failed
    assert search.failed - search.held <= max(1, TOLERANCE * search.held)


def test_trials_are_bounded() -> None:
    search = Search(1.0, num_trials=3)
    assert len(run(search, 1000.0)) == 3
    assert (search.held, search.failed, search.is_settled) == (4.0, None, False)


def test_nothing_holds() -> None:
    search = Search(8, num_trials=40, is_whole=True)
    assert run(search, 0) == [8, 4, 2, 1]
    assert (search.held, search.failed) == (None, 1)
    assert search.is_settled


def test_everything_holds_up_to_the_highest() -> None:
    search = Search(3.0, num_trials=40, highest=20.0)
    assert run(search, 1e9) == [3.0, 6.0, 12.0, 20.0]
    assert search.is_settled
