"""Breaker: failures open it, probes close it."""

from dataclasses import replace

import pytest

from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.schema import RouterConfig
from headrace.core.router.breaker import MAX_DOUBLINGS, Breaker

S = NS_PER_S
CONFIG = RouterConfig(breaker_failures=3, breaker_open_s=5.0, breaker_probes=2)


def opened(config: RouterConfig = CONFIG) -> Breaker:
    breaker = Breaker(config)
    for _ in range(config.breaker_failures):
        breaker.fail(Ns(0))
    return breaker


def test_failures_in_a_short_time_open_it() -> None:
    breaker = Breaker(CONFIG)
    breaker.fail(Ns(0))
    breaker.fail(Ns(2 * S))
    assert breaker.allows(Ns(3 * S))
    breaker.fail(Ns(4 * S))
    assert not breaker.allows(Ns(5 * S))


def test_failures_now_and_then_do_not() -> None:
    breaker = Breaker(CONFIG)
    for minute in range(50):
        breaker.fail(Ns(60 * minute * S))
    assert breaker.is_closed


def test_one_probe_at_a_time_and_enough_of_them_close_it() -> None:
    breaker = opened()
    assert not breaker.allows(Ns(4 * S))
    assert breaker.allows(Ns(5 * S))
    breaker.is_probed = True
    assert not breaker.allows(Ns(6 * S))
    breaker.succeed(Ns(7 * S))
    assert not breaker.is_closed
    assert breaker.allows(Ns(7 * S))
    breaker.succeed(Ns(7 * S))
    assert breaker.is_closed


def test_a_failed_probe_opens_it_for_twice_as_long_with_an_end() -> None:
    breaker = opened()
    now = 0
    for doubling in range(1, 10):
        now = breaker.until_ns
        breaker.fail(Ns(now))
        assert breaker.until_ns - now == 5 * S << min(doubling, MAX_DOUBLINGS)


def test_what_was_under_way_when_it_opened_says_nothing_new() -> None:
    breaker = opened()
    until_ns = breaker.until_ns
    breaker.fail(Ns(1 * S))
    assert breaker.until_ns == until_ns


def test_it_can_be_forgotten_when_all_is_long_ago() -> None:
    breaker = Breaker(CONFIG)
    breaker.fail(Ns(0))
    assert not breaker.is_forgettable(Ns(1 * S))
    assert breaker.is_forgettable(Ns(300 * S))
    assert not opened().is_forgettable(Ns(1000 * S))


@pytest.mark.parametrize("most", [1, 2, 3, 10])
def test_a_failure_soon_after_it_was_closed_opens_it_for_twice_as_long(most: int) -> None:
    """As of a worker that crashes every two seconds, and answers probes in between."""
    config = replace(CONFIG, breaker_failures=most)
    breaker = opened(config)
    for num_closed in range(1, 4):
        now = breaker.until_ns
        for _ in range(config.breaker_probes):
            breaker.succeed(now)
        assert breaker.is_closed
        now = Ns(now + 2 * S)
        breaker.fail(Ns(now))
        assert breaker.until_ns - now == 5 * S << num_closed


def test_one_that_was_well_for_long_may_fail_as_often_as_another() -> None:
    breaker = opened()
    for _ in range(CONFIG.breaker_probes):
        breaker.succeed(Ns(5 * S))
    breaker.fail(Ns(90 * S))
    breaker.fail(Ns(90 * S))
    assert breaker.is_closed
    breaker.fail(Ns(90 * S))
    assert breaker.until_ns == 95 * S
