"""Twins: a prefix that is being computed is worth waiting for."""

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
        for name in seq.chain.names[seq.num_computed // self._kv.block_size :]:
            self._coming[name] = self._coming.get(name, 0) + 1

    def forget(self, seq: Sequence) -> None:
        for name in seq.chain.names[seq.num_computed // self._kv.block_size :]:
            self.arrived(name)

    def arrived(self, name: bytes) -> None:
        count = self._coming.get(name, 0)
        if count > 1:
            self._coming[name] = count - 1
        elif count:
            del self._coming[name]
