"""What the workers have cached, as far as the router knows: by their word, or by what it sent them.

Decides which layer of the index an event changes, and when a worker must send a snapshot.
"""

from collections.abc import Callable, Iterable, Sequence

from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.events import WorkerKv, WorkerKvSnapshot
from headrace.core.router.fleet import Fleet
from headrace.core.router.index import PrefixIndex, bits_of
from headrace.core.router.worker import Booking, Worker

LateKv = Callable[[Sequence[WorkerId]], Iterable[WorkerKv]]
"""What these workers have said by now of their blocks and nobody has told yet: for whoever tells of
blocks only where a choice depends on it.
"""


class Caches:
    def __init__(self, config: RouterConfig, fleet: Fleet, late_kv: LateKv | None = None) -> None:
        self.index = PrefixIndex(Ns(round(config.index_ttl_s * NS_PER_S)))
        self.num_resyncs = 0
        self._fleet = fleet
        self._late_kv = late_kv
        # The policy `prefix` goes by what it sent, whatever workers publish.
        self._listens = config.policy != "prefix"

    def match(self, now: Ns, names: Sequence[bytes]) -> list[tuple[int, int]]:
        """Who has how many leading blocks. What a worker has not told of its blocks yet concerns
        only those who want blocks that it has told of: those before them, or those that it evicts.
        """
        hits = self.index.match(names)
        if self._late_kv is None or not hits:
            return hits
        found = [self._fleet.with_bit(bit) for bits, _ in hits for bit in bits_of(bits)]
        is_news = False
        for event in self._late_kv([worker.worker_id for worker in found]):
            worker = self._fleet.find(event.worker_id)
            if worker is not None:
                self.hear(now, worker, event)
                is_news = True
        return self.index.match(names) if is_news else hits

    def holders(self, names: Sequence[bytes], hits: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """(who has most of these by now, how many leading ones), of what `match` has found: what is
        still to be computed there cannot be copied from there.
        """
        if not hits:
            return 0, 0
        most, depth = hits[0]
        here = most & self.index.holders_of(names[depth - 1])
        if here:
            return here, depth
        found = self.index.match(names, is_here=True)
        return found[0] if found else (0, 0)

    def _publishes(self, worker: Worker) -> bool:
        return self._listens and worker.up.publishes_kv

    def hear(self, now: Ns, worker: Worker, event: WorkerKv | WorkerKvSnapshot) -> bool:
        """Whether to ask the worker for a snapshot."""
        if not self._publishes(worker):
            return False
        if isinstance(event, WorkerKv):
            fresh, asks = worker.feed.take(now, event.first_seq_no, event.changes)
            self.index.apply(worker.bit, fresh)
        else:
            asks = self._load(now, worker, event)
        self.num_resyncs += asks
        return asks

    def _load(self, now: Ns, worker: Worker, snapshot: WorkerKvSnapshot) -> bool:
        """A new place in the index forgets the old one at once, however much it held."""
        self.index.close_slot(worker.bit)
        self._fleet.move(worker, self.index.open_slot())
        self.index.store(worker.bit, snapshot.names)
        later, asks = worker.feed.restart(now, snapshot.seq_no)
        for changes in later:
            self.index.apply(worker.bit, changes)
        for booking in worker.bookings():
            self.expect(booking)
        return asks

    # ---- requests

    def expect(self, booking: Booking) -> None:
        """It will be computed there, so its twin should go there too."""
        if not booking.is_started:
            self.index.expect(booking.worker.bit, booking.new_names)

    def computed(self, booking: Booking) -> None:
        """It is there, or was; whoever publishes has said so himself."""
        self.index.stop_expecting(booking.worker.bit, booking.new_names)
        if not (self._publishes(booking.worker) and booking.request.are_names_published):
            self.index.remember(booking.worker.bit, booking.request.block_names)

    def gone(self, booking: Booking) -> None:
        if not booking.is_started:
            self.index.stop_expecting(booking.worker.bit, booking.new_names)
