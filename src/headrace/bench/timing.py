"""Repeating work within an allowance of time.

Decides how often; refuses to know what is repeated.
"""

import time
from collections.abc import Callable

MIN_RUNS, MAX_RUNS = 3, 40
_OVERDRAFT = 0.25
_LONG_S = 0.25  # a run that takes as long hardly notices code and memory that are cold


class Allowance:
    """Time for a number of measurements, which those that need less leave to the ones after."""

    def __init__(
        self,
        seconds: float,
        num_measurements: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._end_s = clock() + seconds
        self._overdraft_s = _OVERDRAFT * seconds
        self._num_left = num_measurements

    def times_s(self, work: Callable[[], object]) -> list[float]:
        """How long each run took; a short first one, which touches code and memory, is left out.

        The last measurements may overdraw the allowance by a quarter. Empty beyond that.
        """
        left_s = self._end_s - self._clock()
        share_s = left_s / max(1, self._num_left)
        self._num_left -= 1
        if left_s <= -self._overdraft_s:
            return []
        first_s = spent_s = self._run(work)
        times_s = [first_s] if first_s > min(_LONG_S, share_s) else []
        while len(times_s) < MAX_RUNS and (
            spent_s < share_s or (len(times_s) < MIN_RUNS and spent_s < 1.5 * share_s)
        ):
            times_s.append(self._run(work))
            spent_s += times_s[-1]
        return times_s

    def _run(self, work: Callable[[], object]) -> float:
        begin_s = self._clock()
        work()
        return self._clock() - begin_s
