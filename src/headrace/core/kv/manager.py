"""KvManager: which block holds what, under all-or-nothing reservations.

Every block is in exactly one of three states: free; held by one or more sequences; cached, that is
named in the tree and held by nobody. free + cached + held == total after every call.
"""

from collections.abc import Sequence

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import BlockRemoved, BlockStored
from headrace.core.base.plan import BlockCopy
from headrace.core.base.types import BlockId, SeqId
from headrace.core.kv.names import BlockChain
from headrace.core.kv.tree import BlockTree, Node


class Hit(msgspec.Struct, frozen=True):
    """Tokens whose KV is already there, once `copy` has been carried out."""

    num_tokens: int
    copy: BlockCopy | None = None


class _Table:
    """A sequence's blocks in order: first those in the tree, then its private ones."""

    __slots__ = ("block_ids", "nodes")

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.block_ids: list[BlockId] = [node.block_id for node in nodes]


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
        self._tree = BlockTree()
        self._tables: dict[SeqId, _Table] = {}
        self._changes: list[BlockStored | BlockRemoved] = []

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

    def num_unheld_of(self, chain: BlockChain, num_blocks: int) -> int:
        """Of so many leading blocks, all matched, those that a reservation would take out of
        `num_available`.
        """
        return self._tree.num_unheld_of(chain.names, num_blocks)

    def _match(self, chain: BlockChain, limit_tokens: int) -> list[Node]:
        if not self.prefix_cache:
            return []
        return self._tree.match(chain.names[: limit_tokens // self.block_size])

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
        nodes = self._match(chain, limit_tokens)
        for node in nodes:
            self._tree.hold(node)
        table = self._tables[seq_id] = _Table(nodes)
        num_tokens = len(nodes) * self.block_size
        tail = self._find_tail(nodes, chain, tokens[num_tokens:limit_tokens])
        if tail is None:
            return Hit(num_tokens)
        node, num_shared = tail
        # Held while a block is taken for the copy, which must not evict what it copies from.
        self._tree.hold(node)
        copied = self._take()
        self._tree.let_go(node)
        if copied is None:
            return Hit(num_tokens)
        table.block_ids.append(copied)
        return Hit(num_tokens + num_shared, BlockCopy(node.block_id, copied, num_shared))

    def _find_tail(
        self, nodes: list[Node], chain: BlockChain, tokens: Sequence[int]
    ) -> tuple[Node, int] | None:
        if not (self.prefix_cache and self._can_copy):
            return None
        parent = nodes[-1].name if nodes else chain.root
        tail = self._tree.match_tail(parent, tokens[: self.block_size])
        return tail if tail and tail[1] > 0 else None

    def reserve(self, seq_id: SeqId, num_tokens: int) -> bool:
        """Let the table cover `num_tokens` tokens, evicting cached blocks. All or nothing."""
        table = self._tables[seq_id]
        num_missing = self.blocks_for(num_tokens) - len(table.block_ids)
        if num_missing <= 0:
            return True
        if num_missing > self.num_available:
            return False
        for _ in range(num_missing):
            block_id = self._take()
            if block_id is None:
                raise InvariantError("available blocks miscounted", available=self.num_available)
            table.block_ids.append(block_id)
        return True

    def commit(
        self, seq_id: SeqId, chain: BlockChain, tokens: Sequence[int], num_computed: int
    ) -> None:
        """Make full computed blocks matchable; a known block takes the place of its new twin."""
        if not self.prefix_cache:
            return
        size, tree, names = self.block_size, self._tree, chain.names
        table = self._tables[seq_id]
        nodes, block_ids = table.nodes, table.block_ids
        for index in range(len(nodes), num_computed // size):
            name = names[index]
            node = tree.find(name)
            if node is not None:
                tree.hold(node)
                self._free.append(block_ids[index])
                block_ids[index] = node.block_id
            else:
                parent = names[index - 1] if index else chain.root
                block_id = block_ids[index]
                held = tuple(tokens[index * size : (index + 1) * size])
                node = tree.insert(name, parent, held, block_id)
                self._changes.append(BlockStored(name, parent, block_id))
            nodes.append(node)

    def open_load(
        self, load_id: SeqId, chain: BlockChain, num_blocks: int, *, num_kept: int = 0
    ) -> int | None:
        """Open a table for the first `num_blocks` blocks of `chain`, of which those that are not
        known come from elsewhere: how many are known. None, with nothing changed, where none is
        missing or there is no room, `num_kept` available blocks being left.
        """
        if not self.prefix_cache:
            return None
        nodes = self._tree.match(chain.names[:num_blocks])
        num_missing = num_blocks - len(nodes)
        num_left = self.num_available - num_kept - sum(node.num_holders == 0 for node in nodes)
        if not num_missing or num_missing > num_left:
            return None
        for node in nodes:
            self._tree.hold(node)
        self._tables[load_id] = _Table(nodes)
        self.reserve(load_id, num_blocks * self.block_size)
        return len(nodes)

    def lend(self, seq_id: SeqId, lease_id: SeqId) -> None:
        """The sequence's named blocks are held by `lease_id` instead, its private ones are free."""
        table = self._tables.pop(seq_id)
        self._free.extend(reversed(table.block_ids[len(table.nodes) :]))
        del table.block_ids[len(table.nodes) :]
        self._tables[lease_id] = table

    def release(self, seq_id: SeqId) -> None:
        """Named blocks stay cached, private ones become free. Idempotent."""
        table = self._tables.pop(seq_id, None)
        if table is None:
            return
        self._free.extend(reversed(table.block_ids[len(table.nodes) :]))
        for node in reversed(table.nodes):
            self._tree.let_go(node)

    def clear_cache(self) -> int:
        """Forget every block that nobody holds; returns how many."""
        count = self._tree.num_unheld
        for _ in range(count):
            self._free.append(self._evict())
        return count

    def drain_changes(self) -> tuple[BlockStored | BlockRemoved, ...]:
        """What became matchable or ceased to be since the last call, in order."""
        if not self._changes:
            return ()
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    def check(self) -> None:
        """Raise InvariantError unless each block is free, cached or held, and counted right."""
        self._tree.check()
        holders: dict[bytes, int] = {}
        held: set[BlockId] = set()
        num_private = 0
        for seq_id, table in self._tables.items():
            for node, block_id in zip(table.nodes, table.block_ids, strict=False):
                if self._tree.find(node.name) is not node or node.block_id != block_id:
                    raise InvariantError(
                        "table and tree disagree", seq_id=seq_id, block_id=block_id
                    )
                holders[node.name] = holders.get(node.name, 0) + 1
            held.update(table.block_ids)
            num_private += len(table.block_ids) - len(table.nodes)
        for node in self._tree:
            if node.num_holders != holders.get(node.name, 0):
                raise InvariantError(
                    "holders miscounted", block_id=node.block_id, counted=node.num_holders
                )
        if len(held) != num_private + len(holders):
            raise InvariantError(
                "private block held twice", held=len(held), expected=num_private + len(holders)
            )
        seen = held | {node.block_id for node in self._tree} | set(self._free)
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

    def _take(self) -> BlockId | None:
        if self._free:
            return self._free.pop()
        return self._evict() if self._tree.num_unheld else None

    def _evict(self) -> BlockId:
        node = self._tree.evict()
        self._changes.append(BlockRemoved(node.name))
        return node.block_id
