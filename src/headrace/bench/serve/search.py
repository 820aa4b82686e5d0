"""The highest load that keeps the limits, by bracketing and halving.

Decides which load is tried next; refuses to know how it is tried. A trial is noisy, so the answer
is a bracket: the highest load that was seen to hold, and the lowest above it that was not.
"""

from math import sqrt
from typing import Final

TOLERANCE: Final = 0.05  # the bracket's ends are no further apart than this share


class Search:
    """Ask `next_level`, try it, `tell`; until there is none."""

    def __init__(
        self, start: float, *, num_trials: int, is_whole: bool = False, highest: float = 1e6
    ) -> None:
        """`is_whole`: levels are whole numbers from 1 on. `highest` is never exceeded."""
        self._start = start
        self._num_left = num_trials
        self._is_whole = is_whole
        self._highest = highest
        self.held: float | None = None  # the highest level below all that failed
        self.failed: float | None = None  # the lowest level

    @property
    def is_settled(self) -> bool:
        """Whether the bracket is as narrow as it shall be, or nothing is left to try."""
        held, failed = self.held, self.failed
        if failed is None:
            return held is not None and held >= self._highest
        if held is None:
            return self._is_whole and failed <= 1
        gap = failed - held
        return gap <= TOLERANCE * held or (self._is_whole and gap <= 1)

    def next_level(self) -> float | None:
        if self._num_left <= 0 or self.is_settled:
            return None
        if self.held is None and self.failed is None:
            level = self._start
        elif self.failed is None:
            level = 2 * (self.held or 0.0)
        elif self.held is None:
            level = self.failed / 2
        else:
            level = sqrt(self.held * self.failed)
        if self._is_whole:
            level = float(max(1, round(level)))
            if self.held is not None and self.failed is not None:
                level = min(max(level, self.held + 1), self.failed - 1)
        return min(level, self._highest)

    def tell(self, level: float, *, holds: bool) -> None:
        """What came of a level that `next_level` named."""
        self._num_left -= 1
        if holds:
            self.held = level
        else:
            self.failed = level
