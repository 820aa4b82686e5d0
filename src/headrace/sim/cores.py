"""Cores that several workers share: steps that run at once slow each other down.

While k workers are in a step, each gets on with 1 / slow_down[k - 1] of the speed that it has alone
(processor sharing, with measured speeds). Decides when a step ends; refuses to know what it
computes.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial

from headrace.core.base.types import Ns
from headrace.core.cost.calibration import LARGE_STEP_TOKENS
from headrace.sim.runtime import SimRuntime


class SharedCores:
    """Beyond the last figure of `slow_down`, speed falls with the number of workers."""

    def __init__(
        self,
        slow_down: Sequence[float],
        runtime: SimRuntime,
        *,
        slow_down_large: Sequence[float] = (),
    ) -> None:
        """Large steps may have other figures: LARGE_STEP_TOKENS and more."""
        self._slow_down = slow_down
        self._slow_down_large = slow_down_large or slow_down
        self._runtime = runtime
        self._slow_downs: dict[Hashable, Sequence[float]] = {}  # of what runs, by worker
        self._left_ns: dict[Hashable, float] = {}  # work of what runs, by worker
        self._calls: dict[Hashable, Callable[[], None]] = {}
        self._moved_ns = Ns(0)  # up to when progress is counted
        self._epoch = 0
        self.most_at_once = 0

    def start(
        self, worker: Hashable, work_ns: Ns, on_end: Callable[[], None], num_tokens: int = 1
    ) -> None:
        """A step of so much work, of a worker that is in none."""
        self._progress()
        is_large = num_tokens >= LARGE_STEP_TOKENS
        self._slow_downs[worker] = self._slow_down_large if is_large else self._slow_down
        self._left_ns[worker] = float(work_ns)
        self._calls[worker] = on_end
        self.most_at_once = max(self.most_at_once, len(self._left_ns))
        self._call_at_next_end()

    def stop(self, worker: Hashable) -> None:
        """Its step ends nevermore."""
        self._progress()
        self._left_ns.pop(worker, None)
        self._calls.pop(worker, None)
        self._call_at_next_end()

    def _slowness(self, worker: Hashable) -> float:
        slow_down = self._slow_downs[worker]
        num, known = len(self._left_ns), len(slow_down)
        if num <= known:
            return slow_down[num - 1]
        return slow_down[-1] * num / known

    def _progress(self) -> None:
        passed_ns = self._runtime.now - self._moved_ns
        self._moved_ns = self._runtime.now
        for worker in self._left_ns:
            self._left_ns[worker] -= passed_ns / self._slowness(worker)

    def _call_at_next_end(self) -> None:
        self._epoch += 1
        if self._left_ns:
            least_ns = min(
                left_ns * self._slowness(worker) for worker, left_ns in self._left_ns.items()
            )
            self._runtime.call_later(Ns(round(max(0.0, least_ns))), partial(self._end, self._epoch))

    def _end(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._progress()
        # Rounded to nanoseconds, the first may seem to be a moment short of its end.
        ended = [worker for worker, left_ns in self._left_ns.items() if left_ns <= 1.0]
        calls = [self._calls.pop(worker) for worker in ended]
        for worker in ended:
            del self._left_ns[worker]
        self._call_at_next_end()
        for call in calls:
            call()
