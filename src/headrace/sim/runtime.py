"""A virtual clock over a heap of calls: the time of a simulation is the time of its next call."""

from collections.abc import Callable
from heapq import heappop, heappush

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import Ns


class SimRuntime:
    """Runs calls in order of their time; calls of the same time run in the order they were asked
    for.
    """

    def __init__(self) -> None:
        self._now = Ns(0)
        self._num_calls = 0
        self._calls: list[tuple[Ns, int, Callable[[], None]]] = []

    @property
    def now(self) -> Ns:
        return self._now

    def call_at(self, at_ns: Ns, call: Callable[[], None]) -> None:
        """Run `call` at `at_ns`; where that is past, after everything else that is due now."""
        heappush(self._calls, (max(at_ns, self._now), self._num_calls, call))
        self._num_calls += 1

    def call_later(self, delay_ns: Ns, call: Callable[[], None]) -> None:
        self.call_at(Ns(self._now + delay_ns), call)

    def run(self, *, max_calls: int) -> None:
        """Run until no call is left; more than `max_calls` of them are taken for a world that never
        ends.
        """
        for _ in range(max_calls):
            if not self._calls:
                return
            self._now, _, call = heappop(self._calls)
            call()
        if self._calls:
            raise InvariantError("simulation does not end", max_calls=max_calls, now=self._now)
