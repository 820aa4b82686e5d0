"""Copies of KV over links that they share.

A copy takes the latency and then its bytes' time, at the rate that its place in the network gives
it: every worker has one link out and one in, and the copies that cross a link share it fairly
(max-min, by progressive filling: Bertsekas and Gallager, Data Networks, 1992).
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.cost.fitted import Link
from headrace.sim.runtime import SimRuntime


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way from one worker to another."""

    source: Hashable
    target: Hashable
    num_bytes: float
    on_end: Callable[[float], None]  # told how many bytes have arrived, all or fewer
    num_left: float = 0.0
    bytes_per_s: float = 0.0
    is_moving: bool = False  # its latency has passed


class Network:
    """What is on its way between workers. `link` is each worker's, in each direction."""

    def __init__(self, link: Link, runtime: SimRuntime) -> None:
        self._link = link
        self._runtime = runtime
        self._transfers: dict[Transfer, None] = {}  # in the order in which they were sent
        self._moved_ns = Ns(0)  # up to when their progress is counted
        self._epoch = 0  # rates have changed since a call was asked for in another one

    def send(
        self,
        source: Hashable,
        target: Hashable,
        num_bytes: float,
        on_end: Callable[[float], None],
    ) -> None:
        transfer = Transfer(source, target, num_bytes, on_end, num_left=num_bytes)
        self._transfers[transfer] = None
        latency_ns = Ns(round(self._link.latency_ns))
        self._runtime.call_later(latency_ns, partial(self._begin, transfer))

    def lose(self, place: Hashable) -> None:
        """Nothing more of what is on its way from there or to there will arrive."""
        self._progress()
        for transfer in [one for one in self._transfers if place in (one.source, one.target)]:
            self._end(transfer)
        self._share()

    def _begin(self, transfer: Transfer) -> None:
        if transfer in self._transfers:
            self._progress()
            transfer.is_moving = True
            self._share()

    def _end(self, transfer: Transfer) -> None:
        del self._transfers[transfer]
        transfer.on_end(transfer.num_bytes - transfer.num_left)

    def _progress(self) -> None:
        """Count what has moved at the rates so far."""
        seconds = (self._runtime.now - self._moved_ns) / NS_PER_S
        self._moved_ns = self._runtime.now
        for transfer in self._transfers:
            transfer.num_left = max(0.0, transfer.num_left - transfer.bytes_per_s * seconds)

    def _share(self) -> None:
        """Fair rates for all that move, and a call when the first of them is there."""
        moving = [one for one in self._transfers if one.is_moving]
        fair_rates(moving, self._link.bytes_per_s)
        self._epoch += 1
        if moving:
            left_s = min(one.num_left / one.bytes_per_s for one in moving)
            at_ns = Ns(self._runtime.now + round(left_s * NS_PER_S))
            self._runtime.call_at(at_ns, partial(self._arrive, self._epoch))

    def _arrive(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._progress()
        # Rounded to nanoseconds, the first may seem to be a moment short of its end.
        for transfer in list(self._transfers):
            if transfer.is_moving and transfer.num_left <= transfer.bytes_per_s / NS_PER_S:
                transfer.num_left = 0.0
                self._end(transfer)
        self._share()


def fair_rates(transfers: list[Transfer], bytes_per_s: float) -> None:
    """Set max-min fair rates: again and again, the link with the least for each of its transfers
    gives them that, and what they leave elsewhere is for others.
    """
    crossing: dict[Hashable, list[Transfer]] = {}
    for one in transfers:
        crossing.setdefault(("out", one.source), []).append(one)
        crossing.setdefault(("in", one.target), []).append(one)
    room = dict.fromkeys(crossing, bytes_per_s)
    open_transfers = dict.fromkeys(transfers)
    while open_transfers:
        counts = {
            link: sum(one in open_transfers for one in crossed)
            for link, crossed in crossing.items()
        }
        tightest = min(
            (link for link, count in counts.items() if count),
            key=lambda link: room[link] / counts[link],
        )
        rate = room[tightest] / counts[tightest]
        for one in crossing[tightest]:
            if one in open_transfers:
                del open_transfers[one]
                one.bytes_per_s = rate
                room["out", one.source] -= rate
                room["in", one.target] -= rate
