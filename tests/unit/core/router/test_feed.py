"""KvFeed: gaps, repetitions, snapshots that are too old."""

from headrace.core.base.types import Ns
from headrace.core.router.feed import ASK_AGAIN_NS, MAX_KEPT_BLOCKS, KvFeed
from support.routing import names, stored

ALL = tuple(change for name in names("a", 8) for change in stored(name))


def test_changes_in_order_are_taken_as_they_are() -> None:
    feed = KvFeed()
    assert feed.take(Ns(0), 0, ALL[:3]) == (ALL[:3], False)
    assert feed.take(Ns(0), 3, ALL[3:]) == (ALL[3:], False)
    assert feed.is_whole


def test_what_was_seen_is_left_out() -> None:
    feed = KvFeed()
    feed.take(Ns(0), 0, ALL[:4])
    assert feed.take(Ns(0), 0, ALL[:4]) == ((), False)
    assert feed.take(Ns(0), 2, ALL[2:6]) == (ALL[4:6], False)


def test_a_gap_asks_once_and_again_after_a_while() -> None:
    feed = KvFeed()
    assert feed.take(Ns(0), 2, ALL[2:3]) == (ALL[2:3], True)
    assert not feed.is_whole
    assert feed.take(Ns(1), 3, ALL[3:4]) == (ALL[3:4], False)
    assert feed.take(Ns(ASK_AGAIN_NS), 4, ALL[4:5]) == (ALL[4:5], True)


def test_a_snapshot_is_completed_by_what_came_after_it() -> None:
    feed = KvFeed()
    feed.take(Ns(0), 2, ALL[2:4])
    feed.take(Ns(0), 4, ALL[4:6])
    later, asks = feed.restart(Ns(1), 3)
    assert (later, asks) == ([ALL[3:4], ALL[4:6]], False)
    assert feed.next_seq_no == 6
    assert feed.is_whole


def test_late_changes_fill_the_gap_behind_a_snapshot() -> None:
    feed = KvFeed()
    feed.take(Ns(0), 4, ALL[4:6])
    assert feed.take(Ns(0), 2, ALL[2:4])[0] == ()  # out of order
    later, asks = feed.restart(Ns(1), 2)
    assert (later, asks) == ([ALL[2:4], ALL[4:6]], False)


def test_a_snapshot_older_than_a_gap_asks_for_another() -> None:
    feed = KvFeed()
    feed.take(Ns(0), 2, ALL[2:3])
    feed.take(Ns(0), 5, ALL[5:6])
    later, asks = feed.restart(Ns(1), 3)
    assert (later, asks) == ([()], True)
    assert feed.next_seq_no == 6
    assert not feed.is_whole


def test_what_is_kept_for_a_snapshot_is_bounded() -> None:
    feed = KvFeed()
    big = stored(*names("b", MAX_KEPT_BLOCKS))
    feed.take(Ns(0), 1, big)
    feed.take(Ns(0), 1 + len(big), ALL)
    _, asks = feed.restart(Ns(1), 1)
    assert asks
