"""HandoffCore: KV that comes from another worker, and KV that is kept for one.

A load is a copy on its way into blocks that nobody else may have; it outlives the sequence that
waited for it, since whoever copies may still write. A lease holds the blocks of a sequence that has
ended here and goes on elsewhere. Both end by themselves: a load's waiting and a lease have
deadlines. Whatever fails, the tokens are computed.

Decides which blocks are asked for and how long they are held; refuses to know how KV is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import TIERS, StartCopy
from headrace.core.base.types import SeqId
from headrace.core.kv.manager import KvManager
from headrace.core.kv.names import BlockChain


@dataclass(slots=True)
class _Load:
    chain: BlockChain
    tokens: Sequence[int]
    num_known_blocks: int  # that were here already
    names: tuple[bytes, ...]  # of those that are to come
    waiting: list[SeqId]  # empty = it is no longer worth waiting for


class HandoffCore:
    """Handles count from 0 and are never used again. A handle is a copy's id; what it holds is in
    the KvManager under `holder(handle)`, a SeqId that no sequence has, which is its timer's id too.
    """

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._next_handle = 0
        self._loads: dict[int, _Load] = {}
        self._load_of: dict[SeqId, int] = {}
        self._load_of_block: dict[bytes, int] = {}
        self._leases: dict[SeqId, int] = {}  # handles by the sequence that has ended

    @property
    def num_blocks(self) -> int:
        """Blocks that are held for loads and leases."""
        if not (self._loads or self._leases):
            return 0
        handles = (*self._loads, *self._leases.values())
        return len({b for handle in handles for b in self._kv.block_ids(holder(handle))})

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    # ---- loads

    def join(self, seq_id: SeqId, chain: BlockChain, limit_tokens: int) -> bool:
        """Whether the next block that the sequence lacks is on its way, for another one, so that it
        waits too.
        """
        num_known = self._kv.match(chain, limit_tokens)
        names = chain.names[num_known : limit_tokens // self._kv.block_size]
        handle = self._load_of_block.get(names[0]) if names else None
        if handle is None or not self._loads[handle].waiting:
            return False
        self._loads[handle].waiting.append(seq_id)
        self._load_of[seq_id] = handle
        return True

    def begin(
        self,
        seq_id: SeqId,
        chain: BlockChain,
        tokens: Sequence[int],
        source: str,
        limit_tokens: int,
        *,
        num_kept: int,
    ) -> StartCopy | None:
        """The copy of what is missing among the full blocks of the first `limit_tokens` tokens; the
        sequence waits for it. None where nothing is missing, or there is no room beside the
        `num_kept` blocks that others were promised.
        """
        num_blocks = limit_tokens // self._kv.block_size
        handle = self._next_handle
        num_known = self._kv.open_load(holder(handle), chain, num_blocks, num_kept=num_kept)
        if num_known is None:
            return None
        self._next_handle += 1
        names = tuple(chain.names[num_known:num_blocks])
        self._loads[handle] = _Load(chain, tuple(tokens), num_known, names, [seq_id])
        self._load_of[seq_id] = handle
        self._load_of_block.update(dict.fromkeys(names, handle))
        return StartCopy(
            copy_id=handle,
            source=source,
            names=names,
            block_ids=self._kv.block_ids(holder(handle))[num_known:],
            seq_id=seq_id,
            is_handoff=source != TIERS,
        )

    def end(self, copy_id: int, num_blocks: int) -> list[SeqId]:
        """The first `num_blocks` of a copy are there, and no more will come. The sequences that
        have waited for it until now.
        """
        load = self._loads.pop(copy_id, None)
        if load is None:
            raise InvariantError("a copy ended that was never started", copy_id=copy_id)
        if not 0 <= num_blocks <= len(load.names):
            raise InvariantError("a copy of more blocks than were asked for", copy_id=copy_id)
        for name in load.names:
            if self._load_of_block.get(name) == copy_id:
                del self._load_of_block[name]
        num_tokens = (load.num_known_blocks + num_blocks) * self._kv.block_size
        self._kv.commit(holder(copy_id), load.chain, load.tokens, num_tokens)
        self._kv.release(holder(copy_id))
        return self._stop_waiting(load)

    def give_up(self, seq_id: SeqId) -> None:
        """The sequence waits for its load no more."""
        self._loads[self._load_of.pop(seq_id)].waiting.remove(seq_id)

    def _stop_waiting(self, load: _Load) -> list[SeqId]:
        waiting, load.waiting = load.waiting, []
        for seq_id in waiting:
            del self._load_of[seq_id]
        return waiting

    # ---- leases

    def lend(self, seq_id: SeqId) -> int:
        """Hold the named blocks of a sequence that ends, for whoever copies them. The handle."""
        handle = self._next_handle
        self._next_handle += 1
        self._kv.lend(seq_id, holder(handle))
        self._leases[seq_id] = handle
        return handle

    def end_lease(self, seq_id: SeqId) -> None:
        """They may be evicted from here on. Idempotent, unknown ids included."""
        handle = self._leases.pop(seq_id, None)
        if handle is not None:
            self._kv.release(holder(handle))

    # ---- time

    def expire(self, timer_id: int) -> list[SeqId]:
        """The deadline of what the handle stands for, if that still is. The sequences that need not
        wait for its load any longer.
        """
        handle = -1 - timer_id
        for seq_id, lease in self._leases.items():
            if lease == handle:
                self.end_lease(seq_id)
                return []
        load = self._loads.get(handle)
        return [] if load is None else self._stop_waiting(load)


def holder(handle: int) -> SeqId:
    return SeqId(-1 - handle)
