"""Who has stopped is told from who computes for long, and from a machine with too much to do."""

from random import Random

import pytest

from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.router.front_events import WorkerResumed, WorkerStalled
from headrace.core.router.stalls import CALM_NS, LOOK_NS, Stalls

LIMIT_NS = 750 * NS_PER_MS
ONE, OTHER = WorkerId(1), WorkerId(2)


def at(milliseconds: float) -> Ns:
    return Ns(round(milliseconds * NS_PER_MS))


def test_it_takes_two_looks_and_somebody_else_who_is_heard() -> None:
    stalls = Stalls(LIMIT_NS)
    assert stalls.turn(at(0), {ONE: at(0), OTHER: at(0)}) == []
    assert stalls.next_ns == LIMIT_NS + 1
    heard = {ONE: at(0), OTHER: at(600)}
    assert stalls.turn(at(750), heard) == []
    assert stalls.turn(at(751), heard) == []
    assert stalls.next_ns == at(751) + LOOK_NS
    assert stalls.turn(at(801), heard) == [WorkerStalled(ONE)]
    assert stalls.next_ns == at(600) + LIMIT_NS + 1
    assert stalls.turn(at(802), heard) == []
    assert stalls.turn(at(900), {ONE: at(900), OTHER: at(850)}) == [WorkerResumed(ONE)]


def test_what_comes_before_the_second_look_counts() -> None:
    """As where the listener was asleep, and has not read it yet."""
    stalls = Stalls(LIMIT_NS)
    assert stalls.turn(at(2000), {ONE: at(0), OTHER: at(1990)}) == []
    assert stalls.turn(at(2001), {ONE: at(2001), OTHER: at(1990)}) == []
    assert stalls.turn(at(2100), {ONE: at(2001), OTHER: at(1990)}) == []
    assert stalls.turn(at(2760), {ONE: at(2001), OTHER: at(2700)}) == []  # a first look again


def test_where_nobody_is_heard_nobody_has_stopped() -> None:
    stalls = Stalls(LIMIT_NS)
    for now in (1000, 1500, 2000):
        assert stalls.turn(at(now), {ONE: at(0), OTHER: at(10)}) == []
        assert stalls.next_ns is None
    heard = {ONE: at(2001), OTHER: at(10)}
    for now in (2001, 2100, 2499):  # the other one may be about to say something, too
        assert stalls.turn(at(now), heard) == []
    assert stalls.next_ns == at(2000) + CALM_NS
    assert stalls.turn(at(2500), heard) == [WorkerStalled(OTHER)]


def test_one_that_comes_back_makes_the_others_suspect_later() -> None:
    stalls = Stalls(LIMIT_NS)
    third = WorkerId(3)
    heard = {ONE: at(0), OTHER: at(900), third: at(100)}
    stalls.turn(at(800), heard)
    assert stalls.turn(at(850), heard) == [WorkerStalled(ONE)]
    heard[ONE] = at(860)
    assert stalls.turn(at(860), heard) == [WorkerResumed(ONE)]
    for now in (900, 1000, 1300):
        assert stalls.turn(at(now), heard) == []
    assert stalls.turn(at(1360), heard) == [WorkerStalled(third)]


def test_who_is_gone_is_not_told_again() -> None:
    stalls = Stalls(LIMIT_NS)
    heard = {ONE: at(0), OTHER: at(900)}
    stalls.turn(at(800), heard)
    assert stalls.turn(at(850), heard) == [WorkerStalled(ONE)]
    assert stalls.turn(at(900), {OTHER: at(900)}) == []
    assert stalls.turn(at(950), {}) == []
    assert stalls.next_ns is None


@pytest.mark.parametrize("seed", range(50))
def test_whoever_beats_is_well_and_whoever_stops_is_found_within_the_second(seed: int) -> None:
    """Beats come every 250 ms, late by up to 400; the listener is asleep for up to 40 ms."""
    rng = Random(seed)
    stalls, now = Stalls(LIMIT_NS), Ns(0)
    stops_ns = at(rng.uniform(500, 3000))
    heard = {WorkerId(number): at(0) for number in range(3)}
    beats = {worker_id: at(rng.uniform(0, 250)) for worker_id in heard}
    found: list[tuple[Ns, object]] = []
    while now < at(6000):
        now = Ns(now + at(rng.uniform(0, 40)))
        for worker_id, beat_ns in beats.items():
            if beat_ns <= now and not (worker_id == ONE and beat_ns >= stops_ns):
                heard[worker_id] = now
                beats[worker_id] = Ns(beat_ns + at(rng.uniform(250, 650)))
        found += [(now, event) for event in stalls.turn(now, heard)]
    ((found_ns, event),) = found
    assert event == WorkerStalled(ONE)
    assert LIMIT_NS < found_ns - heard[ONE] <= at(1000)
