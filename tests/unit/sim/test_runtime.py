"""Virtual time."""

from functools import partial

import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import Ns
from headrace.sim.runtime import SimRuntime


def test_calls_run_in_order_of_time_and_then_of_asking() -> None:
    runtime = SimRuntime()
    seen: list[tuple[str, int]] = []

    def note(name: str) -> None:
        seen.append((name, runtime.now))

    for at, name in ((20, "late"), (10, "first"), (10, "second"), (0, "now")):
        runtime.call_at(Ns(at), partial(note, name))
    runtime.run(max_calls=10)
    assert seen == [("now", 0), ("first", 10), ("second", 10), ("late", 20)]


def test_time_never_goes_back() -> None:
    runtime = SimRuntime()
    seen: list[int] = []

    def ask_for_the_past() -> None:
        runtime.call_at(Ns(3), lambda: seen.append(runtime.now))
        runtime.call_later(Ns(0), lambda: seen.append(runtime.now))
        runtime.call_later(Ns(5), lambda: seen.append(runtime.now))

    runtime.call_at(Ns(100), ask_for_the_past)
    runtime.run(max_calls=10)
    assert seen == [100, 100, 105]


def test_an_endless_world_is_cut() -> None:
    runtime = SimRuntime()

    def again() -> None:
        runtime.call_later(Ns(1), again)

    again()
    with pytest.raises(InvariantError, match="does not end"):
        runtime.run(max_calls=50)
    assert runtime.now == 50


def test_the_last_allowed_call_is_not_one_too_many() -> None:
    runtime = SimRuntime()
    runtime.call_later(Ns(1), lambda: None)
    runtime.run(max_calls=1)


def test_ticks_run_among_calls_and_do_not_count_as_the_next_one() -> None:
    runtime = SimRuntime()
    seen: list[str] = []
    runtime.tick_later(Ns(5), lambda: seen.append("tick"))
    assert runtime.next_ns is None
    runtime.call_at(Ns(5), lambda: seen.append("call"))
    runtime.call_at(Ns(3), lambda: seen.append("first"))
    runtime.tick_later(Ns(9), lambda: seen.append("last tick"))
    assert runtime.next_ns == 3
    runtime.run(max_calls=4)
    assert seen == ["first", "tick", "call", "last tick"]
    assert runtime.next_ns is None
