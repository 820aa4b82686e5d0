"""How the highest rate is found, and when a run has said enough."""

from collections.abc import Callable

import pytest

from headrace.core.base.types import SeqId
from headrace.core.telemetry import RequestRecord
from headrace.sim.capacity import PRECISION, largest_rate, share_is_good
from support.records import record_of


@pytest.mark.parametrize("limit", [0.4, 3.0, 55.0])
def test_the_largest_rate_is_found_from_either_side(limit: float) -> None:
    found = largest_rate(lambda rate: rate <= limit, start=8.0)
    assert found <= limit < found * (1.0 + PRECISION)


def test_a_search_has_an_end() -> None:
    assert largest_rate(lambda _: False, start=1.0) == 0.0
    assert largest_rate(lambda _: True, start=1.0) == 128.0  # as far as it looked


@pytest.mark.parametrize(("num_bad", "is_good", "num_told"), [(2, True, 20), (3, False, 3)])
def test_a_run_ends_when_its_verdict_is_known(
    num_bad: int, *, is_good: bool, num_told: int
) -> None:
    told = 0

    def run(note: Callable[[RequestRecord], None]) -> None:
        nonlocal told
        for index in range(20):
            told += 1
            note(record_of(SeqId(index), good=index >= num_bad))

    assert share_is_good(run, 20, 0.9) is is_good
    assert told == num_told
