"""The radix tree of named blocks: what is matchable, who holds it, what is evicted first.

A node is a run of full blocks, one behind the other, that the same sequences hold; where one needs
only the beginning of a run, it becomes two. So most of what happens to blocks happens to many at
once. A run that some sequence holds has held ancestors only, so every unheld block can be evicted
once those behind it are gone: last blocks first, least recently used first. Recency is a counter,
not a clock.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import BlockId
from headrace.core.kv.names import WORD_BYTES, words_of

MAX_TAIL_CANDIDATES = 8
MIN_HEAP = 1024


class Run:
    """Full blocks in the tree, at least one. `num_holders` counts the sequences that use them."""

    __slots__ = (
        "block_ids",
        "children",
        "last_used",
        "names",
        "num_holders",
        "parent",
        "words",
    )

    def __init__(
        self,
        parent: "Run | None",
        names: list[bytes],
        words: bytearray,
        block_ids: list[BlockId],
    ) -> None:
        self.parent = parent  # None = it is a root, which has no blocks
        self.names = names
        self.words = words  # of the tokens of all its blocks
        self.block_ids = block_ids
        self.num_holders = 0
        # Of the first block; each one behind it was used one tick before the one that it follows.
        self.last_used = 0
        # Children by their first word, so that a tail looks only at blocks that can share something
        # with it; then by their first name.
        self.children: dict[bytes, dict[bytes, Run]] = {}

    @property
    def first_word(self) -> bytes:
        return bytes(self.words[:WORD_BYTES])

    @property
    def tail_used(self) -> int:
        return self.last_used - len(self.names) + 1

    def num_shared(self, names: Sequence[bytes], start: int, end: int) -> int:
        """How many of its blocks have the names from `start` on, up to `end`; the first one has.

        A name stands for all that is before it, so this need not look at each of them.
        """
        own, num = self.names, min(len(self.names), end - start)
        if own[num - 1] == names[start + num - 1]:
            return num
        return bisect_left(range(num), 1, key=lambda i: own[i] != names[start + i])


class BlockTree:
    """Named blocks by name, with least-recently-used eviction of unheld ones from the ends."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * WORD_BYTES  # of its words
        self._runs: dict[bytes, Run] = {}  # by the name of their first block
        self._roots: dict[bytes, Run] = {}
        # Heap of when leaves' ends were used, and whose ticks those are: no two have the same one.
        # Stale entries are skipped.
        self._leaves: list[int] = []
        self._leaf_of: dict[int, Run] = {}
        self._tick = 0
        self.num_unheld = 0  # blocks

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    # ---- queries

    def depth(self, names: Sequence[bytes], limit: int) -> int:
        """How many of the first `limit` of a chain's names are known."""
        return sum([num for _, num in self._walk(names, 0, min(limit, len(names)))])

    def num_unheld_of(self, names: Sequence[bytes], depth: int) -> int:
        """Of the first `depth` blocks of a chain, all known, those that nobody holds."""
        return sum([num for run, num in self._walk(names, 0, depth) if not run.num_holders])

    def _walk(self, names: Sequence[bytes], start: int, end: int) -> Iterator[tuple[Run, int]]:
        """The runs that have the longest known prefix of the names from `start`, where one begins,
        up to `end`, and how many blocks of it each has: all, but for the last one.
        """
        while start < end and (run := self._runs.get(names[start])) is not None:
            num = run.num_shared(names, start, end)
            yield run, num
            if num < len(run.names):
                return
            start += num

    def match_tail(self, parent: Run, tokens: Sequence[int]) -> tuple[Run, int] | None:
        """The child whose first block has the longest common beginning with these tokens, no more
        than a block of them, and its length in tokens.
        """
        if not (tokens and parent.children):
            return None
        words = words_of(tokens)
        best: tuple[Run, int] | None = None
        for index, child in enumerate(parent.children.get(words[:WORD_BYTES], {}).values()):
            if index == MAX_TAIL_CANDIDATES:
                break
            shared = _num_shared(child.words[: len(words)], words)
            if best is None or shared > best[1]:
                best = child, shared
        return best

    def is_root(self, name: bytes) -> bool:
        return name in self._roots

    # ---- holders

    def root(self, name: bytes) -> Run:
        """What the first blocks of all chains with this root are behind."""
        return self._roots.get(name) or Run(None, [name], bytearray(), [])

    def hold_prefix(self, names: Sequence[bytes], start: int, end: int) -> list[Run]:
        """Let one more hold the longest known prefix of the names from `start` on, up to `end`. The
        last run ends with it.
        """
        held: list[Run] = []
        for run, num in [*self._walk(names, start, end)]:
            held.append(run if num == len(run.names) else self._split(run, num))
            self.hold(held[-1])
        return held

    def append(
        self, behind: Run, names: list[bytes], words: bytearray, block_ids: list[BlockId]
    ) -> Run:
        """Add blocks behind a run that the same sequence holds, or behind a root; it holds them,
        too. Returns the run that they are the end of.
        """
        if behind.num_holders == 1 and not behind.children:
            behind.names += names
            behind.words += words
            behind.block_ids += block_ids
            return behind
        if behind.parent is None:
            self._roots[behind.names[0]] = behind
        run = Run(behind, names, words, block_ids)
        run.num_holders = 1
        behind.children.setdefault(run.first_word, {})[names[0]] = run
        self._runs[names[0]] = run
        return run

    def hold(self, run: Run) -> None:
        if not run.num_holders:
            self.num_unheld -= len(run.names)
        run.num_holders += 1

    def let_go(self, run: Run) -> None:
        """Drop one hold. Call for a chain's end first: children must age before parents."""
        if run.num_holders <= 0:
            raise InvariantError("blocks let go more often than held", block_ids=run.block_ids)
        run.num_holders -= 1
        if not run.num_holders:
            self.num_unheld += len(run.names)
            self._tick += len(run.names)
            run.last_used = self._tick
            if not run.children:
                self._push_leaf(run)

    def first_block(self, run: Run) -> Run:
        """What to hold for the sake of the run's first block."""
        return run if run.num_holders or len(run.names) == 1 else self._split(run, 1)

    def _split(self, run: Run, num: int) -> Run:
        """Make its first `num` blocks a run of their own, which is returned. The rest remains what
        those who hold all of it end with.
        """
        assert run.parent is not None
        first, first_word, num_bytes = run.names[0], run.first_word, num * self._block_bytes
        upper = Run(run.parent, run.names[:num], run.words[:num_bytes], run.block_ids[:num])
        upper.num_holders, upper.last_used = run.num_holders, run.last_used
        # Under the same key, so that siblings keep their order.
        run.parent.children[first_word][first] = self._runs[first] = upper
        del run.names[:num], run.words[:num_bytes], run.block_ids[:num]
        run.parent, run.last_used = upper, run.last_used - num
        upper.children[run.first_word] = {run.names[0]: run}
        self._runs[run.names[0]] = run
        return upper

    # ---- eviction

    def evict(self, num_blocks: int) -> tuple[list[bytes], list[BlockId]]:
        """Remove the least recently used blocks, none before those behind it: their names, and the
        blocks, which the caller owns from then on.
        """
        names: list[bytes] = []
        block_ids: list[BlockId] = []
        while (num_more := num_blocks - len(names)) > 0:
            run = self._pop_leaf()
            num_left = max(0, len(run.names) - num_more)
            names += reversed(run.names[num_left:])
            block_ids += reversed(run.block_ids[num_left:])
            if num_left:
                del run.names[num_left:], run.block_ids[num_left:]
                del run.words[num_left * self._block_bytes :]
                self._push_leaf(run)
            else:
                self._remove(run)
        self.num_unheld -= len(names)
        return names, block_ids

    def _pop_leaf(self) -> Run:
        while self._leaves:
            tail_used = heappop(self._leaves)
            run = self._leaf_of.pop(tail_used, None)
            if run is None or run.num_holders or run.children or not run.names:
                continue
            if run.tail_used == tail_used:
                return run
        raise InvariantError("nothing to evict", num_unheld=self.num_unheld)

    def _remove(self, run: Run) -> None:
        parent, first, first_word = run.parent, run.names[0], run.first_word
        if parent is None:
            raise InvariantError("a root is not evictable", name=first.hex())
        del self._runs[first]
        run.names.clear()
        siblings = parent.children[first_word]
        del siblings[first]
        if not siblings:
            del parent.children[first_word]
        if not parent.children:
            if parent.parent is None:
                del self._roots[parent.names[0]]
            elif not parent.num_holders:
                self._push_leaf(parent)

    def _push_leaf(self, run: Run) -> None:
        heappush(self._leaves, run.tail_used)
        self._leaf_of[run.tail_used] = run
        if len(self._leaves) > 2 * len(self._runs) + MIN_HEAP:
            # Blocks that are held and let go again and again leave stale entries behind.
            self._leaf_of = {
                leaf.tail_used: leaf
                for leaf in self._runs.values()
                if not leaf.num_holders and not leaf.children
            }
            self._leaves = [*self._leaf_of]
            heapify(self._leaves)

    def check(self) -> None:
        """Raise InvariantError unless holders and links are consistent."""
        unheld = 0
        for first, run in self._runs.items():
            unheld += 0 if run.num_holders else len(run.names)
            nums = {len(run.names), len(run.block_ids), len(run.words) / self._block_bytes}
            if run.names[:1] != [first] or len(nums) > 1:
                raise InvariantError("blocks of a run miscounted", name=first.hex(), counted=nums)
            parent = run.parent
            if parent is None or parent.children.get(run.first_word, {}).get(first) is not run:
                raise InvariantError("block is not its parent's child", name=first.hex())
            if parent.parent is not None and run.num_holders > parent.num_holders:
                raise InvariantError("block held by more than the one before", name=first.hex())
        if unheld != self.num_unheld:
            raise InvariantError("unheld blocks miscounted", counted=unheld, kept=self.num_unheld)


def _num_shared(left: bytearray, right: bytes) -> int:
    """How many words of as many they begin with together."""
    differing = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    num_bits = (differing & -differing).bit_length() - 1 if differing else 8 * len(right)
    return num_bits // (8 * WORD_BYTES)
