"""A cost model that remembers the largest figures that it was asked for, so that whoever asks can
be told where answers left what was measured.
"""

import msgspec

from headrace.core.base.types import Ns
from headrace.core.cost.model import CostModel, StepShape


class WatchedCost:
    """The CostModel that it is given, watched."""

    def __init__(self, cost: CostModel, seen: StepShape | None) -> None:
        """`seen` holds the largest figures that were measured, where somebody knows them."""
        self._cost = cost
        self._seen = seen
        self._largest = [0] * len(StepShape.__struct_fields__)

    @property
    def largest(self) -> StepShape:
        """Each figure by itself."""
        return StepShape(*self._largest)

    def beyond(self) -> list[str]:
        """In words, what it was asked for that was not measured."""
        return [] if self._seen is None else self.largest.beyond(self._seen)

    def step_ns(self, shape: StepShape) -> Ns:
        for place, figure in enumerate(msgspec.structs.astuple(shape)):
            if figure > self._largest[place]:
                self._largest[place] = figure
        return self._cost.step_ns(shape)

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        return self._cost.copy_ns(num_bytes, link)
