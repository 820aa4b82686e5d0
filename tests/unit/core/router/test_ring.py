"""Ring: few sessions move when a worker comes or goes."""

from headrace.core.router.ring import Ring

KEYS = [f"session-{i}" for i in range(1000)]
NAMES = [f"w{i}" for i in range(8)]


def first(ring: Ring, key: str) -> str:
    return next(ring.order(key))


def test_sessions_are_spread_and_every_name_is_asked_once() -> None:
    ring = Ring(NAMES)
    counts = [sum(first(ring, key) == name for key in KEYS) for name in NAMES]
    assert min(counts) > 50
    assert sorted(ring.order("x")) == NAMES


def test_only_the_sessions_of_a_lost_worker_move() -> None:
    before, after = Ring(NAMES), Ring(NAMES[1:])
    moved = [key for key in KEYS if first(before, key) != first(after, key)]
    assert moved
    assert all(first(before, key) == "w0" for key in moved)


def test_the_order_of_names_does_not_matter() -> None:
    assert list(Ring(NAMES).order("x")) == list(Ring(reversed(NAMES)).order("x"))


def test_an_empty_ring_has_nobody() -> None:
    assert list(Ring([]).order("x")) == []
