"""PrefixIndex: layers, slots, and that bisecting finds what walking finds."""

import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.router.index import PrefixIndex
from headrace.core.router.replicas import NUM_PARTS
from support.routing import names, removed, stored

CHAIN = names("a", 10)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(Ns(120 * NS_PER_S))


def test_slots_are_the_lowest_free_bits(index: PrefixIndex) -> None:
    assert [index.open_slot() for _ in range(3)] == [1, 2, 4]


@pytest.mark.parametrize("find", ["match", "walk"])
def test_each_worker_is_found_at_its_depth(index: PrefixIndex, find: str) -> None:
    one, two, three, four = (index.open_slot() for _ in range(4))
    index.apply(one, stored(*CHAIN))
    index.apply(two, stored(*CHAIN[:3]))
    index.apply(three, stored(*CHAIN[:3]))
    index.apply(four, stored(*names("b", 10)))
    assert getattr(index, find)(CHAIN) == [(one, 10), (two | three, 3)]
    assert getattr(index, find)(CHAIN[:2]) == [(one | two | three, 2)]
    assert getattr(index, find)(()) == []
    index.check()


def test_stored_twice_is_one_replica_and_removed_twice_none(index: PrefixIndex) -> None:
    one, two = index.open_slot(), index.open_slot()
    index.apply(one, stored(*CHAIN[:2]) * 2)
    index.apply(two, stored(CHAIN[0]))
    assert index.num_replicas == 3
    index.apply(one, removed(CHAIN[1], CHAIN[0], CHAIN[0]))
    assert index.num_replicas == 1
    assert index.match(CHAIN) == [(two, 1)]
    index.check()


def test_a_closed_slot_is_forgotten_at_once_and_comes_back_when_swept(index: PrefixIndex) -> None:
    one, two = index.open_slot(), index.open_slot()
    index.apply(one, stored(*CHAIN))
    index.apply(two, stored(*CHAIN[:5]))
    index.expect(one, names("c", 2))
    index.close_slot(one)
    assert index.match(CHAIN) == [(two, 5)]
    assert index.open_slot() == 4  # not 1: blocks still mention it
    for _ in range(NUM_PARTS + 1):
        index.tend(Ns(0))
    index.check()
    assert index.num_replicas == 5
    assert index.open_slot() == one


def test_expected_blocks_count_until_they_no_longer_are(index: PrefixIndex) -> None:
    one, two = index.open_slot(), index.open_slot()
    index.expect(one, CHAIN)
    index.expect(two, CHAIN[:4])
    assert index.match(CHAIN) == [(one, 10), (two, 4)]
    index.stop_expecting(one, CHAIN)
    assert index.match(CHAIN) == [(two, 4)]
    index.stop_expecting(two, CHAIN)
    assert index.match(CHAIN) == []
    index.check()


def test_remembered_blocks_fade_between_one_and_two_halves_of_the_ttl(index: PrefixIndex) -> None:
    one = index.open_slot()
    index.tend(Ns(0))
    index.remember(one, CHAIN)
    for second in range(60):
        index.tend(Ns(second * NS_PER_S))
    assert index.match(CHAIN) == [(one, 10)]
    for second in range(60, 122):
        index.tend(Ns(second * NS_PER_S))
    assert index.match(CHAIN) == []
    index.remember(one, CHAIN)
    index.tend(Ns(10_000 * NS_PER_S))  # a long silence is no reason to work for long
    assert index.match(CHAIN) == []


def test_the_first_memory_lasts_as_long_as_any(index: PrefixIndex) -> None:
    begin = 10_000
    one = index.open_slot()
    index.tend(Ns(begin * NS_PER_S))
    index.remember(one, CHAIN)
    for second in range(begin, begin + 60):
        index.tend(Ns(second * NS_PER_S))
    assert index.match(CHAIN) == [(one, 10)]


def test_a_hole_shortens_a_hit_or_is_not_seen_and_breaks_nothing(index: PrefixIndex) -> None:
    one = index.open_slot()
    index.apply(one, stored(*CHAIN))
    index.apply(one, removed(CHAIN[4]))
    ((worker, depth),) = index.match(CHAIN)
    assert worker == one
    assert depth in (4, 10)


def test_counts_that_are_wrong_are_loud(index: PrefixIndex) -> None:
    index.apply(index.open_slot(), stored(*CHAIN))
    index.num_replicas += 1
    with pytest.raises(InvariantError, match="miscounted"):
        index.check()
    index.num_replicas -= 1
    index.apply(1 << 7, stored(names("z", 1)[0]))
    with pytest.raises(InvariantError, match="unknown worker"):
        index.check()
