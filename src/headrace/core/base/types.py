"""Identifiers and time, as distinct types so that a checker keeps them apart."""

from typing import Final, NewType

Ns = NewType("Ns", int)
"""A point in time or a duration in integer nanoseconds, so that ties and sums are exact."""

SeqId = NewType("SeqId", int)
StepId = NewType("StepId", int)
BlockId = NewType("BlockId", int)

WorkerId = NewType("WorkerId", int)
"""Never reused: a worker that was restarted has another id, and the same name."""

NS_PER_S: Final = 1_000_000_000
FOREVER_NS: Final = 1 << 62
NS_PER_MS: Final = 1_000_000
