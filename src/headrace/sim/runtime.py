"""A virtual clock over a heap of calls: the time of a simulation is the time of its next call."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Final

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import Ns
from headrace.ops.native import _native

# Of allocations between two looks for garbage that refers to itself, which simulations do not make:
# looking through a million living blocks would cost a sixth of the time.
OBJECTS_PER_COLLECTION: Final = 2_000_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """And memory in large pages from now on: a simulation looks up objects all over it."""
    _native.large_arenas()
    _native.large_heap()
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], OBJECTS_PER_COLLECTION), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_Call = tuple[Ns, int, Callable[[], None]]


class SimRuntime:
    """Runs calls in order of their time; calls of the same time run in the order they were asked
    for.

    Ticks are calls that come again and again, whatever else happens: where nothing else does,
    whoever asks for them may look at `next_ns` and leave some out.
    """

    def __init__(self) -> None:
        self._now = Ns(0)
        self._num_calls = 0
        self._calls: list[_Call] = []
        self._ticks: list[_Call] = []

    @property
    def now(self) -> Ns:
        return self._now

    @property
    def next_ns(self) -> Ns | None:
        """The time of the next call that is no tick; None = there is none."""
        return self._calls[0][0] if self._calls else None

    def call_at(self, at_ns: Ns, call: Callable[[], None]) -> None:
        """Run `call` at `at_ns`; where that is past, after everything else that is due now."""
        heappush(self._calls, (at_ns if at_ns > self._now else self._now, self._num_calls, call))
        self._num_calls += 1

    def call_later(self, delay_ns: Ns, call: Callable[[], None]) -> None:
        self.call_at(Ns(self._now + delay_ns), call)

    def tick_later(self, delay_ns: Ns, call: Callable[[], None]) -> None:
        heappush(self._ticks, (Ns(self._now + delay_ns), self._num_calls, call))
        self._num_calls += 1

    def run(self, *, max_calls: int) -> None:
        """Run until no call is left; more than `max_calls` of them are taken for a world that never
        ends.
        """
        calls, ticks = self._calls, self._ticks
        for _ in range(max_calls):
            if not ticks or (calls and calls[0] < ticks[0]):
                if not calls:
                    return
                self._now, _, call = heappop(calls)
            else:
                self._now, _, call = heappop(ticks)
            call()
        if calls or ticks:
            raise InvariantError("simulation does not end", max_calls=max_calls, now=self._now)
