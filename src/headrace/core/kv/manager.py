"""KvManager: which block holds what, under all-or-nothing reservations.

Every block is in exactly one of three states: free; held by one or more sequences; cached, that is
named in the tree and held by nobody. free + cached + held == total after every call.
"""

from collections.abc import Iterator, Sequence

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import BlocksRemoved, BlocksStored, KvChange
from headrace.core.base.plan import BlockCopy
from headrace.core.base.types import BlockId, SeqId
from headrace.core.kv.hit import Hit
from headrace.core.kv.names import WORD_BYTES, BlockChain
from headrace.core.kv.tree import BlockTree, Run


class _Table:
    """A sequence's blocks in order: first those in the tree, then its private ones."""

    __slots__ = ("block_ids", "num_named", "tail")

    def __init__(self, runs: list[Run]) -> None:
        self.tail: Run | None = None  # ends with the last one in the tree
        self.num_named = 0
        self.block_ids: list[BlockId] = []
        self.add(runs)

    def add(self, runs: list[Run]) -> None:
        """These take the place of what is behind those in the tree."""
        for run in runs:
            end = self.num_named + len(run.names)
            self.block_ids[self.num_named : end] = run.block_ids
            self.tail, self.num_named = run, end

    def runs(self) -> Iterator[Run]:
        """Those in the tree, the last one first."""
        run = self.tail
        while run is not None and run.parent is not None:
            yield run
            run = run.parent


class KvManager:
    """Allocation, prefix sharing and eviction of `num_blocks` blocks of `block_size` tokens."""

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_cache: bool = True, can_copy: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._can_copy = can_copy
        # Popped from the end, so that low ids are used first.
        self._free: list[BlockId] = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._tree = BlockTree(block_size)
        self._tables: dict[SeqId, _Table] = {}
        self._changes: list[KvChange] = []

    # ---- queries

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._tree.num_unheld

    @property
    def num_available(self) -> int:
        """Blocks that a reservation could take."""
        return len(self._free) + self._tree.num_unheld

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_held(self, seq_id: SeqId) -> int:
        """Blocks that the sequence holds."""
        table = self._tables.get(seq_id)
        return len(table.block_ids) if table else 0

    def block_ids(self, seq_id: SeqId) -> tuple[BlockId, ...]:
        return tuple(self._tables[seq_id].block_ids)

    def match(self, chain: BlockChain, limit_tokens: int) -> int:
        """Leading full blocks of `chain` within `limit_tokens` that are known. Changes nothing."""
        if not self.prefix_cache:
            return 0
        return self._tree.depth(chain.names, limit_tokens // self.block_size)

    def names(self) -> list[bytes]:
        """Of all that is known, in no order that means anything."""
        return [name for run in self._tree for name in run.names]

    def is_root(self, name: bytes) -> bool:
        """Whether known blocks are the first ones of their chains behind this."""
        return self._tree.is_root(name)

    def num_unheld_of(self, chain: BlockChain, num_blocks: int) -> int:
        """Of so many leading blocks, all matched, those that a reservation would take out of
        `num_available`.
        """
        return self._tree.num_unheld_of(chain.names, num_blocks)

    # ---- changes

    def admit(
        self, seq_id: SeqId, chain: BlockChain, tokens: Sequence[int], limit_tokens: int
    ) -> Hit:
        """Open a table for a sequence that holds nothing, with every known block of its first
        `limit_tokens` tokens.

        Part of one more block may come by copy, where a block of another sequence begins with the
        same tokens; then the block for it is taken too, if one is available.
        """
        if seq_id in self._tables:
            raise InvariantError("sequence already holds blocks", seq_id=seq_id)
        num_full = limit_tokens // self.block_size if self.prefix_cache else 0
        runs = self._tree.hold_prefix(chain.names, 0, min(num_full, len(chain.names)))
        table = self._tables[seq_id] = _Table(runs)
        num_tokens = table.num_named * self.block_size
        end = min(limit_tokens, num_tokens + self.block_size)
        tail = self._find_tail(table, chain, tokens[num_tokens:end])
        if tail is None:
            return Hit(num_tokens)
        run, num_shared = tail
        # Held while a block is taken for the copy, which must not evict what it copies from.
        source = self._tree.first_block(run)
        self._tree.hold(source)
        copied = self._take(1) if self.num_available else []
        self._tree.let_go(source)
        if not copied:
            return Hit(num_tokens)
        table.block_ids += copied
        copy = BlockCopy(source.block_ids[0], copied[0], num_shared)
        return Hit(num_tokens + num_shared, copy)

    def _find_tail(
        self, table: _Table, chain: BlockChain, tokens: Sequence[int]
    ) -> tuple[Run, int] | None:
        if not (self.prefix_cache and self._can_copy):
            return None
        behind = table.tail or self._tree.root(chain.root)
        tail = self._tree.match_tail(behind, tokens)
        return tail if tail and tail[1] > 0 else None

    def reserve(self, seq_id: SeqId, num_tokens: int) -> bool:
        """Let the table cover `num_tokens` tokens, evicting cached blocks. All or nothing."""
        table = self._tables[seq_id]
        num_missing = self.blocks_for(num_tokens) - len(table.block_ids)
        if num_missing <= 0:
            return True
        if num_missing > self.num_available:
            return False
        table.block_ids += self._take(num_missing)
        return True

    def commit(self, seq_id: SeqId, chain: BlockChain, num_computed: int) -> None:
        """Make full computed blocks matchable; a known block takes the place of its new twin."""
        if not self.prefix_cache:
            return
        table, names, size = self._tables[seq_id], chain.names, self.block_size
        first, end = table.num_named, num_computed // size
        if first >= end:
            return
        known = self._tree.hold_prefix(names, first, end)
        if known:
            num_known = sum([len(run.names) for run in known])
            self._free += table.block_ids[first : first + num_known]
            table.add(known)
            first += num_known
        if first < end:
            new, block_ids = names[first:end], table.block_ids[first:end]
            parent = names[first - 1] if first else chain.root
            self._changes.append(BlocksStored(tuple(new), parent, tuple(block_ids)))
            behind = table.tail or self._tree.root(chain.root)
            block_bytes = size * WORD_BYTES
            words = chain.words[first * block_bytes : end * block_bytes]
            table.tail = self._tree.append(behind, new, words, block_ids)
            table.num_named = end

    def open_load(
        self, load_id: SeqId, chain: BlockChain, num_blocks: int, *, num_kept: int = 0
    ) -> int | None:
        """Open a table for the first `num_blocks` blocks of `chain`, of which those that are not
        known come from elsewhere: how many are known. None, with nothing changed, where none is
        missing or there is no room, `num_kept` available blocks being left.
        """
        if not self.prefix_cache:
            return None
        num_known = self._tree.depth(chain.names, num_blocks)
        num_missing = num_blocks - num_known
        num_unheld = self._tree.num_unheld_of(chain.names, num_known)
        if not num_missing or num_missing > self.num_available - num_kept - num_unheld:
            return None
        self._tables[load_id] = _Table(self._tree.hold_prefix(chain.names, 0, num_known))
        self.reserve(load_id, num_blocks * self.block_size)
        return num_known

    def lend(self, seq_id: SeqId, lease_id: SeqId) -> None:
        """The sequence's named blocks are held by `lease_id` instead, its private ones are free."""
        table = self._tables.pop(seq_id)
        self._free.extend(reversed(table.block_ids[table.num_named :]))
        del table.block_ids[table.num_named :]
        self._tables[lease_id] = table

    def release(self, seq_id: SeqId) -> None:
        """Named blocks stay cached, private ones become free. Idempotent."""
        table = self._tables.pop(seq_id, None)
        if table is None:
            return
        self._free.extend(reversed(table.block_ids[table.num_named :]))
        for run in table.runs():
            self._tree.let_go(run)

    def clear_cache(self) -> int:
        """Forget every block that nobody holds; returns how many."""
        count = self._tree.num_unheld
        self._free += self._evict(count)
        return count

    def drain_changes(self) -> tuple[KvChange, ...]:
        """What became matchable or ceased to be since the last call, in order."""
        if not self._changes:
            return ()
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    def check(self) -> None:
        """Raise InvariantError unless each block is free, cached or held, and counted right."""
        self._tree.check()
        holders: dict[Run, int] = {}
        held: set[BlockId] = set()
        num_private = 0
        for seq_id, table in self._tables.items():
            named: list[BlockId] = []
            for run in table.runs():
                named[:0] = run.block_ids
                holders[run] = holders.get(run, 0) + 1
            if named != table.block_ids[: table.num_named]:
                raise InvariantError("table and tree disagree", seq_id=seq_id, block_ids=named)
            held.update(table.block_ids)
            num_private += len(table.block_ids) - table.num_named
        for run in self._tree:
            if run.num_holders != holders.get(run, 0):
                raise InvariantError(
                    "holders miscounted", block_ids=run.block_ids, counted=run.num_holders
                )
        num_held = num_private + sum(len(run.names) for run in holders)
        if len(held) != num_held:
            raise InvariantError("private block held twice", held=len(held), expected=num_held)
        seen = held.union(self._free, *(run.block_ids for run in self._tree))
        if (
            len(seen) != self.num_blocks
            or self.num_free + self.num_cached + len(held) != self.num_blocks
        ):
            raise InvariantError(
                "block leak",
                free=self.num_free,
                cached=self.num_cached,
                held=len(held),
                total=self.num_blocks,
            )

    def _take(self, num_blocks: int) -> list[BlockId]:
        """So many, at least one, of those that are available."""
        taken = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        if len(taken) < num_blocks:
            taken += self._evict(num_blocks - len(taken))
        return taken

    def _evict(self, num_blocks: int) -> list[BlockId]:
        names, block_ids = self._tree.evict(num_blocks)
        if names:
            self._changes.append(BlocksRemoved(tuple(names)))
        return block_ids
