"""The radix tree of named blocks: what is matchable, who holds it, what is evicted first.

A node is one full block. A node that some sequence holds has held ancestors only, so every unheld
node can be evicted once its children are gone: leaves first, least recently used first. Recency is
a counter, not a clock.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import BlockId

MAX_TAIL_CANDIDATES = 8
MIN_HEAP = 1024


class Node:
    """A full block in the tree. `num_holders` counts the sequences that use it."""

    __slots__ = ("block_id", "children", "last_used", "name", "num_holders", "parent", "tokens")

    def __init__(
        self, name: bytes, parent: "Node | None", tokens: tuple[int, ...], block_id: BlockId
    ) -> None:
        self.name = name
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.num_holders = 0
        self.last_used = 0
        # Children by their first token, so that a tail looks only at blocks that can share
        # something with it.
        self.children: dict[int, dict[bytes, Node]] = {}


NO_BLOCK = BlockId(-1)


class BlockTree:
    """Named blocks by name, with least-recently-used eviction of unheld leaves."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._leaves: list[
            tuple[int, bytes]
        ] = []  # heap of (last_used, name); stale entries are skipped
        self._tick = 0
        self.num_unheld = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, name: bytes) -> Node | None:
        return self._nodes.get(name)

    def depth(self, names: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` of a chain's names are known. Changes nothing.

        Whatever is known has known ancestors, so this need not look at each of them.
        """
        nodes = self._nodes
        return bisect_left(range(min(limit, len(names))), 1, key=lambda i: names[i] not in nodes)

    def num_unheld_of(self, names: Sequence[bytes], depth: int) -> int:
        """Of the first `depth` blocks of a chain, all known, those that nobody holds: the last."""
        nodes = self._nodes
        return depth - bisect_left(range(depth), 1, key=lambda i: nodes[names[i]].num_holders == 0)

    def match(self, names: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest known prefix of `names`. Changes nothing."""
        nodes: list[Node] = []
        for name in names:
            node = self._nodes.get(name)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def match_tail(self, parent: bytes, tokens: Sequence[int]) -> tuple[Node, int] | None:
        """The child of `parent` with the longest common beginning, and its length in tokens."""
        node = self._nodes.get(parent) or self._roots.get(parent)
        if node is None or not tokens:
            return None
        best: tuple[Node, int] | None = None
        for index, child in enumerate(node.children.get(tokens[0], {}).values()):
            if index == MAX_TAIL_CANDIDATES:
                break
            shared = _num_shared(child.tokens, tokens)
            if best is None or shared > best[1]:
                best = child, shared
        return best

    def insert(
        self, name: bytes, parent: bytes, tokens: tuple[int, ...], block_id: BlockId
    ) -> Node:
        """Add a block held by one sequence. Its parent is in the tree (held) or is a root."""
        above = self._nodes.get(parent)
        if above is None:
            above = self._roots.get(parent)
            if above is None:
                above = self._roots[parent] = Node(parent, None, (), NO_BLOCK)
        node = Node(name, above, tokens, block_id)
        node.num_holders = 1
        above.children.setdefault(tokens[0], {})[name] = node
        self._nodes[name] = node
        return node

    def hold(self, node: Node) -> None:
        if node.num_holders == 0:
            self.num_unheld -= 1
        node.num_holders += 1

    def let_go(self, node: Node) -> None:
        """Drop one hold. Call for a chain's end first: children must age before parents."""
        if node.num_holders <= 0:
            raise InvariantError("block let go more often than held", block_id=node.block_id)
        node.num_holders -= 1
        if node.num_holders == 0:
            self.num_unheld += 1
            self._tick += 1
            node.last_used = self._tick
            if not node.children:
                self._push_leaf(node)

    def evict(self) -> Node:
        """Remove the least recently used unheld leaf; the caller owns its block from then on."""
        while self._leaves:
            last_used, name = heappop(self._leaves)
            node = self._nodes.get(name)
            if node is None or node.num_holders or node.children or node.last_used != last_used:
                continue
            self._remove(node)
            return node
        raise InvariantError("nothing to evict", num_unheld=self.num_unheld)

    def _remove(self, node: Node) -> None:
        del self._nodes[node.name]
        self.num_unheld -= 1
        parent = node.parent
        if parent is None:
            raise InvariantError("a root is not evictable", name=node.name.hex())
        siblings = parent.children[node.tokens[0]]
        del siblings[node.name]
        if not siblings:
            del parent.children[node.tokens[0]]
        if not parent.children:
            if parent.parent is None:
                del self._roots[parent.name]
            elif parent.num_holders == 0:
                self._push_leaf(parent)

    def _push_leaf(self, node: Node) -> None:
        heappush(self._leaves, (node.last_used, node.name))
        if len(self._leaves) > 2 * len(self._nodes) + MIN_HEAP:
            # Blocks that are held and let go again and again leave stale entries behind.
            self._leaves = [
                (leaf.last_used, leaf.name)
                for leaf in self._nodes.values()
                if leaf.num_holders == 0 and not leaf.children
            ]
            heapify(self._leaves)

    def check(self) -> None:
        """Raise InvariantError unless holders and links are consistent."""
        unheld = 0
        for node in self._nodes.values():
            unheld += node.num_holders == 0
            parent = node.parent
            if parent is None or parent.children.get(node.tokens[0], {}).get(node.name) is not node:
                raise InvariantError("block is not its parent's child", name=node.name.hex())
            if parent.parent is not None and node.num_holders and not parent.num_holders:
                raise InvariantError("held block under an unheld one", name=node.name.hex())
        if unheld != self.num_unheld:
            raise InvariantError("unheld blocks miscounted", counted=unheld, kept=self.num_unheld)


def _num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count
