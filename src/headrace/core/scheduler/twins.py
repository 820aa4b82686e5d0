"""Twins: a prefix that is being computed is worth waiting for."""

from collections.abc import Iterable

from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.sequence import Sequence

# A sequence waits for a twin only where that saves at least this many blocks of prefill.
MIN_TWIN_BLOCKS = 2


class Twins:
    """Names of the blocks that running sequences have yet to compute from what they know, with how
    many compute them.
    """

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._coming: dict[bytes, int] = {}

    def waits(self, seq: Sequence) -> bool:
        """Whether the next blocks of a waiting sequence come without its doing."""
        if not (self._coming and self._kv.prefix_cache):
            return False
        names = seq.chain.names[: seq.reusable_tokens // self._kv.block_size]
        first = self._kv.match(seq.chain, seq.reusable_tokens)
        last = min(len(names), first + MIN_TWIN_BLOCKS)
        return last - first == MIN_TWIN_BLOCKS and all(
            name in self._coming for name in names[first:last]
        )

    def add(self, seq: Sequence) -> None:
        names, coming = self._names_to_come(seq), self._coming
        if coming.keys().isdisjoint(names):
            coming.update(dict.fromkeys(names, 1))
            return
        for name in names:
            coming[name] = coming.get(name, 0) + 1

    def forget(self, seq: Sequence) -> None:
        self.arrived(self._names_to_come(seq))

    def arrived(self, names: Iterable[bytes]) -> None:
        coming = self._coming
        for name in names:
            if name in coming:
                if coming[name] > 1:
                    coming[name] -= 1
                else:
                    del coming[name]

    def _names_to_come(self, seq: Sequence) -> list[bytes]:
        return seq.chain.names[seq.num_computed // self._kv.block_size :]
