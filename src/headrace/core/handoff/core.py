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
from headrace.core.base.events import StartCopy
from headrace.core.base.types import SeqId
from headrace.core.kv.manager import KvManager
from headrace.core.kv.names import BlockChain


@dataclass(slots=True)
class _Load:
    chain: BlockChain
    tokens: Sequence[int]
    num_known_blocks: int  # that were here already
    waiting: SeqId | None  # None = it is no longer worth waiting for


class HandoffCore:
    """Handles count from 0 and are never used again. A handle is a copy's id; what it holds is in
    the KvManager under `holder(handle)`, a SeqId that no sequence has, which is its timer's id too.
    """

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._next_handle = 0
        self._loads: dict[int, _Load] = {}
        self._load_of: dict[SeqId, int] = {}
        self._leases: dict[SeqId, int] = {}  # handles by the sequence that has ended

    @property
    def num_blocks(self) -> int:
        """Blocks that are held for loads and leases."""
        handles = (*self._loads, *self._leases.values())
        return len({b for handle in handles for b in self._kv.block_ids(holder(handle))})

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def is_waiting(self, seq_id: SeqId) -> bool:
        """Whether the sequence waits for a load."""
        return seq_id in self._load_of

    # ---- loads

    def begin(
        self,
        seq_id: SeqId,
        chain: BlockChain,
        tokens: Sequence[int],
        source: str,
        limit_tokens: int,
    ) -> StartCopy | None:
        """The copy of what is missing among the full blocks of the first `limit_tokens` tokens; the
        sequence waits for it. None where nothing is missing, or there is no room.
        """
        num_blocks = limit_tokens // self._kv.block_size
        handle = self._next_handle
        num_known = self._kv.open_load(holder(handle), chain, num_blocks)
        if num_known is None:
            return None
        self._next_handle += 1
        self._loads[handle] = _Load(chain, tuple(tokens), num_known, seq_id)
        self._load_of[seq_id] = handle
        return StartCopy(
            copy_id=handle,
            source=source,
            names=tuple(chain.names[num_known:num_blocks]),
            block_ids=self._kv.block_ids(holder(handle))[num_known:],
            seq_id=seq_id,
            is_handoff=True,
        )

    def end(self, copy_id: int, num_blocks: int) -> SeqId | None:
        """The first `num_blocks` of a copy are there, and no more will come. The sequence that has
        waited for it, if it still does.
        """
        load = self._loads.pop(copy_id, None)
        if load is None:
            raise InvariantError("a copy ended that was never started", copy_id=copy_id)
        num_asked = len(self._kv.block_ids(holder(copy_id))) - load.num_known_blocks
        if not 0 <= num_blocks <= num_asked:
            raise InvariantError("a copy of more blocks than were asked for", copy_id=copy_id)
        num_tokens = (load.num_known_blocks + num_blocks) * self._kv.block_size
        self._kv.commit(holder(copy_id), load.chain, load.tokens, num_tokens)
        self._kv.release(holder(copy_id))
        if load.waiting is not None:
            del self._load_of[load.waiting]
        return load.waiting

    def give_up(self, seq_id: SeqId) -> None:
        """Nobody waits for the sequence's load any more."""
        handle = self._load_of.pop(seq_id)
        self._loads[handle].waiting = None

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

    def expire(self, timer_id: int) -> SeqId | None:
        """The deadline of what the handle stands for, if that still is. A sequence that need not
        wait for its load any longer.
        """
        handle = -1 - timer_id
        for seq_id, lease in self._leases.items():
            if lease == handle:
                self.end_lease(seq_id)
                return None
        load = self._loads.get(handle)
        if load is None or load.waiting is None:
            return None
        seq_id = load.waiting
        self.give_up(seq_id)
        return seq_id


def holder(handle: int) -> SeqId:
    return SeqId(-1 - handle)
