"""Clients who each ask again when they are answered or refused, and all begin at once.

Decides when requests come, and not which: those are another source's.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from headrace.core.base.request import SeqSpec
from headrace.core.base.types import Ns
from headrace.core.workload.source import Source


class ClosedLoop:
    """A Source of another one's requests, whatever times these have, by `num_clients` who never
    pause. What follows an answer is asked by the client who was answered; one whose request was
    refused, or whose answer broke off, goes on with what nobody has asked yet.
    """

    has_follow_ups = True

    def __init__(self, source: Source, num_clients: int) -> None:
        self._source = source
        self._num_clients = num_clients
        self._coming = source.arrivals()

    def arrivals(self) -> Iterator[SeqSpec]:
        for spec in islice(self._coming, self._num_clients):
            yield msgspec.structs.replace(spec, arrived_ns=Ns(0))

    def follow_up(self, spec: SeqSpec, output: Sequence[int], now: Ns) -> SeqSpec | None:
        following = self._source.follow_up(spec, output, now) or next(self._coming, None)
        return following and msgspec.structs.replace(following, arrived_ns=now)
