"""Requests as they come: some at times of their own, some because others were answered.

Decides nothing about lengths, times or tokens; refuses to know who serves.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Protocol

from headrace.core.base.request import SeqSpec
from headrace.core.base.types import Ns


class Source(Protocol):
    """Sequence ids are unique over arrivals and follow-ups."""

    @property
    def has_follow_ups(self) -> bool:
        """Whether answers lead to more requests."""
        ...

    def arrivals(self) -> Iterator[SeqSpec]:
        """Those that come whatever happens, in the order of `arrived_ns`. To be asked for once."""
        ...

    def follow_up(self, spec: SeqSpec, output: Sequence[int], now: Ns) -> SeqSpec | None:
        """What an end leads to, at its `arrived_ns`. To be told of each end once; one without
        output is that of a request that was refused, or whose answer broke off.
        """
        ...


class Listed:
    """A Source of requests that are given."""

    has_follow_ups = False

    def __init__(self, specs: Iterable[SeqSpec]) -> None:
        self._specs = specs

    def arrivals(self) -> Iterator[SeqSpec]:
        return iter(self._specs)

    def follow_up(self, spec: SeqSpec, output: Sequence[int], now: Ns) -> SeqSpec | None:
        return None


class Until:
    """A Source that falls silent: what would come at `until_ns` or later does not."""

    def __init__(self, source: Source, until_ns: Ns) -> None:
        self._source = source
        self._until_ns = until_ns
        self.has_follow_ups = source.has_follow_ups

    def arrivals(self) -> Iterator[SeqSpec]:
        return takewhile(lambda spec: spec.arrived_ns < self._until_ns, self._source.arrivals())

    def follow_up(self, spec: SeqSpec, output: Sequence[int], now: Ns) -> SeqSpec | None:
        following = self._source.follow_up(spec, output, now)
        return following if following and following.arrived_ns < self._until_ns else None
