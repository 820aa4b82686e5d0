"""HandoffCore: KV that comes from another worker, and KV that is kept for one.

A load is a table of blocks that nobody else may have, some of which are still to come. It is copied
in one piece for a sequence that is here, or piece by piece for one that is expected, as its source
computes it. A load outlives the sequence that waited for it, since whoever copies may still write.
A lease holds the blocks of a sequence that has ended here and goes on elsewhere. All of them end by
themselves: waiting, expecting and leases have deadlines. Whatever fails, the tokens are computed.

Decides which blocks are asked for when, and how long they are held; refuses to know how KV is
copied.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import TIERS, CopyDone, StartCopy
from headrace.core.base.types import Ns, SeqId
from headrace.core.kv.manager import KvManager
from headrace.core.kv.names import BlockChain


class Wanted(NamedTuple):
    """KV of these blocks, from that place."""

    chain: BlockChain
    source: str
    num_blocks: int | None = None  # leading ones that it has, as far as is known; None = all


@dataclass(slots=True, kw_only=True)
class _Load:
    wanted: Wanted
    num_blocks: int
    num_there: int  # of these, from the first one on
    num_offered: int  # that the source has, as far as is known
    num_coming: int = 0  # by a copy that is under way, behind those that are there
    expected: SeqId | None = None  # None = who it is for has come, or will not
    held_until_ns: int = 0  # for whoever is expected
    waiting: dict[SeqId, Ns] = field(default_factory=dict)  # sequences, until when
    is_late: bool = False  # somebody has given up on it
    is_broken: bool = False  # the source did not have what it was asked for

    @property
    def is_wanted(self) -> bool:
        return self.expected is not None or bool(self.waiting)


class Held(NamedTuple):
    """What is held for a sequence that waits, or is expected."""

    handle: int | None = None  # None = nothing
    copy: StartCopy | None = None  # to begin


NOTHING: Final = Held()


class HandoffCore:
    """Handles count from 0 and are never used again. A handle is the id of its load's copies, of
    which there is one at a time; what it holds is in the KvManager under `holder(handle)`, a SeqId
    that no sequence has, which is its timer's id too.

    `num_kept` are blocks that a load may not take, since they are promised to others.
    """

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._next_handle = 0
        self._loads: dict[int, _Load] = {}
        self._load_of: dict[SeqId, int] = {}  # of those that wait
        self._load_for: dict[SeqId, int] = {}  # of those that are expected
        self._load_of_block: dict[bytes, int] = {}  # of blocks that are coming
        self._leases: dict[SeqId, int] = {}  # handles by the sequence that has ended
        self.num_failed_loads = 0  # of which something came late, or not at all

    @property
    def num_blocks(self) -> int:
        """Blocks that are held for loads and leases."""
        if not (self._loads or self._leases):
            return 0
        handles = (*self._loads, *self._leases.values())
        return len({b for handle in handles for b in self._kv.block_ids(holder(handle))})

    @property
    def is_loading(self) -> bool:
        """Whether a copy is under way."""
        return any(load.num_coming for load in self._loads.values())

    # ---- loads for sequences that are here

    def load(
        self, seq_id: SeqId, wanted: Wanted, limit_tokens: int, until: Ns, num_kept: int
    ) -> Held:
        """Let the sequence wait for what it lacks of the full blocks of its first `limit_tokens`
        tokens: for what was held for it, what is on its way for another one, or what its source
        has.
        """
        held = self._claim(seq_id, until)
        if held.handle is None:
            held = self._join(seq_id, wanted.chain, limit_tokens, until)
        if held.handle is None and wanted.source:
            held = self._begin(seq_id, wanted, limit_tokens, until, num_kept)
        return held

    def give_up(self, seq_id: SeqId) -> None:
        """The sequence waits for its load no more."""
        del self._loads[self._load_of.pop(seq_id)].waiting[seq_id]

    def _claim(self, seq_id: SeqId, until: Ns) -> Held:
        handle = self._load_for.pop(seq_id, None)
        if handle is None:
            return NOTHING
        load = self._loads[handle]
        load.expected = None
        load.num_offered = load.num_blocks
        self._wait(seq_id, handle, until)
        copy = self._next_copy(handle)
        if load.num_coming:
            return Held(handle, copy)
        self._close(handle)
        return NOTHING

    def _join(self, seq_id: SeqId, chain: BlockChain, limit_tokens: int, until: Ns) -> Held:
        num_known = self._kv.match(chain, limit_tokens)
        names = chain.names[num_known : limit_tokens // self._kv.block_size]
        handle = self._load_of_block.get(names[0]) if names else None
        if handle is None or self._loads[handle].is_late:
            return NOTHING
        self._wait(seq_id, handle, until)
        return Held(handle)

    def _begin(
        self, seq_id: SeqId, wanted: Wanted, limit_tokens: int, until: Ns, num_kept: int
    ) -> Held:
        num_blocks = limit_tokens // self._kv.block_size
        if wanted.num_blocks is not None:
            num_blocks = min(num_blocks, wanted.num_blocks)
        handle = self._open(wanted, num_blocks, num_kept)
        if handle is None:
            return NOTHING
        self._loads[handle].num_offered = num_blocks
        self._wait(seq_id, handle, until)
        return Held(handle, self._next_copy(handle))

    # ---- loads for sequences that are expected

    def expect(self, seq_id: SeqId, wanted: Wanted, until: Ns, num_kept: int) -> Held:
        """Take blocks for the KV of a sequence that will come, if there is room."""
        if seq_id in self._load_for:
            raise InvariantError("a sequence is expected twice", seq_id=seq_id)
        handle = self._open(wanted, len(wanted.chain.names), num_kept)
        if handle is None:
            return NOTHING
        self._loads[handle].expected = seq_id
        self._loads[handle].held_until_ns = until
        self._load_for[seq_id] = handle
        return Held(handle)

    def offer(self, seq_id: SeqId, num_tokens: int, until: Ns) -> Held:
        """Its source has so many tokens of a sequence that is expected."""
        handle = self._load_for.get(seq_id)
        if handle is None:
            return NOTHING
        load = self._loads[handle]
        load.held_until_ns = until
        num_offered = min(num_tokens // self._kv.block_size, load.num_blocks)
        load.num_offered = max(load.num_offered, num_offered)
        return Held(handle, self._next_copy(handle))

    def disappoint(self) -> bool:
        """Let go of what is held for sequences that are expected, since one that is here can go on
        in no other way. Whether there was any of it.
        """
        num_blocks = self.num_blocks
        for seq_id in list(self._load_for):
            self.end_lease(seq_id)
        return self.num_blocks < num_blocks

    # ---- copies

    def end(self, done: CopyDone) -> tuple[list[SeqId], StartCopy | None]:
        """A copy is over: the sequences that have waited for it until now, or the next copy for
        them.
        """
        handle = done.copy_id
        load = self._loads.get(handle)
        if load is None or not load.num_coming:
            raise InvariantError("a copy ended that was never started", copy_id=handle)
        if not 0 <= done.num_blocks <= load.num_coming:
            raise InvariantError("a copy of more blocks than were asked for", copy_id=handle)
        chain = load.wanted.chain
        for name in chain.names[load.num_there : load.num_there + load.num_coming]:
            if self._load_of_block.get(name) == handle:
                del self._load_of_block[name]
        if done.error or done.num_blocks < load.num_coming:
            self._note_failure(load)
            load.is_broken = True
        load.num_there += done.num_blocks
        load.num_coming = 0
        num_tokens = load.num_there * self._kv.block_size
        self._kv.commit(holder(handle), chain, num_tokens)
        copy = self._next_copy(handle)
        if copy is not None:
            return [], copy
        waiting = self._stop_waiting(load, list(load.waiting))
        if not load.is_wanted:
            self._close(handle)
        return waiting, None

    # ---- leases

    def lend(self, seq_id: SeqId) -> int:
        """Hold the named blocks of a sequence that ends, for whoever copies them. The handle."""
        handle = self._next_handle
        self._next_handle += 1
        self._kv.lend(seq_id, holder(handle))
        self._leases[seq_id] = handle
        return handle

    def end_lease(self, seq_id: SeqId) -> None:
        """What is held for it, to be copied from here or to here, may be evicted from here on.
        Idempotent, unknown ids included.
        """
        handle = self._leases.pop(seq_id, None)
        if handle is not None:
            self._kv.release(holder(handle))
        handle = self._load_for.pop(seq_id, None)
        if handle is not None:
            load = self._loads[handle]
            load.expected = None
            if not load.num_coming:
                self._close(handle)

    # ---- time

    def expire(self, timer_id: int, now: Ns) -> list[SeqId]:
        """A deadline of what the handle stands for has come, if that still is. The sequences that
        need not wait for its load any longer.
        """
        handle = -1 - timer_id
        for seq_id, lease in self._leases.items():
            if lease == handle:
                self.end_lease(seq_id)
                return []
        load = self._loads.get(handle)
        if load is None:
            return []
        late = [seq_id for seq_id, until_ns in load.waiting.items() if until_ns <= now]
        if late:
            self._note_failure(load)
            load.is_late = True
        if load.expected is not None and load.held_until_ns <= now:
            self.end_lease(load.expected)
        return self._stop_waiting(load, late)

    # ---- one load

    def _open(self, wanted: Wanted, num_blocks: int, num_kept: int) -> int | None:
        handle = self._next_handle
        num_known = self._kv.open_load(holder(handle), wanted.chain, num_blocks, num_kept=num_kept)
        if num_known is None:
            return None
        self._next_handle += 1
        self._loads[handle] = _Load(
            wanted=wanted,
            num_blocks=num_blocks,
            num_there=num_known,
            num_offered=num_known,
        )
        return handle

    def _next_copy(self, handle: int) -> StartCopy | None:
        """Of what is offered and not there; None while another copy is under way, too."""
        load = self._loads[handle]
        if load.num_coming or load.is_broken or not load.is_wanted:
            return None
        first, load.num_coming = load.num_there, max(0, load.num_offered - load.num_there)
        if not load.num_coming:
            return None
        names = tuple(load.wanted.chain.names[first : load.num_offered])
        self._load_of_block.update(dict.fromkeys(names, handle))
        return StartCopy(
            copy_id=handle,
            source=load.wanted.source,
            names=names,
            block_ids=self._kv.block_ids(holder(handle))[first : load.num_offered],
            seq_id=next(iter(load.waiting), load.expected),
            is_handoff=load.wanted.source != TIERS,
        )

    def _note_failure(self, load: _Load) -> None:
        self.num_failed_loads += not (load.is_broken or load.is_late)

    def _close(self, handle: int) -> None:
        """Nobody writes to its blocks any more, and nobody wants the rest."""
        load = self._loads.pop(handle)
        self._stop_waiting(load, list(load.waiting))
        self._kv.release(holder(handle))

    def _wait(self, seq_id: SeqId, handle: int, until: Ns) -> None:
        self._loads[handle].waiting[seq_id] = until
        self._load_of[seq_id] = handle

    def _stop_waiting(self, load: _Load, seq_ids: list[SeqId]) -> list[SeqId]:
        for seq_id in seq_ids:
            del load.waiting[seq_id]
            del self._load_of[seq_id]
        return seq_ids


def holder(handle: int) -> SeqId:
    return SeqId(-1 - handle)
