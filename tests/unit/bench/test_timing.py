"""Measurements share a time, and the machine's clock alone ends them."""

from collections.abc import Callable

from headrace.bench.timing import MAX_RUNS, Allowance


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def taking(self, *times_s: float) -> Callable[[], None]:
        """Work whose runs take these times, the last of them from then on."""
        left = list(times_s)

        def work() -> None:
            self.now_s += left.pop(0) if len(left) > 1 else left[0]

        return work


def test_a_short_first_run_is_left_out() -> None:
    clock = Clock()
    times_s = Allowance(1.0, 1, clock).times_s(clock.taking(0.25, 0.125))
    assert times_s == [0.125] * 6


def test_a_long_first_run_counts() -> None:
    clock = Clock()
    assert Allowance(1.0, 1, clock).times_s(clock.taking(2.0)) == [2.0]


def test_short_work_ends_after_enough_runs() -> None:
    clock = Clock()
    assert len(Allowance(1.0, 1, clock).times_s(clock.taking(0.001))) == MAX_RUNS


def test_what_one_leaves_the_next_may_take() -> None:
    clock = Clock()
    allowance = Allowance(2.0, 2, clock)
    allowance.times_s(clock.taking(0.001))
    assert len(allowance.times_s(clock.taking(0.2))) > 1.5 / 0.2


def test_what_comes_too_late_is_not_measured() -> None:
    clock = Clock()
    allowance = Allowance(2.0, 3, clock)
    assert allowance.times_s(clock.taking(2.2)) == [2.2]
    assert allowance.times_s(clock.taking(0.5)) == [0.5]  # overdrawn, but by little
    assert allowance.times_s(clock.taking(0.5)) == []
