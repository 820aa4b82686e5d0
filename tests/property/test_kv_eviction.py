"""Whatever is stored, held and shared together: blocks leave one by one, the least recently used
that nobody holds and nothing follows first.
"""

from random import Random

import pytest

from headrace.core.base.events import BlocksStored
from headrace.core.base.types import SeqId
from headrace.core.kv.manager import KvManager
from headrace.core.kv.names import BlockChain, root_name

SIZE = 2
ROOT = root_name("m", "bf16", SIZE, "", "")


class Blocks:
    """Every block by itself."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}
        self.num_holders: dict[bytes, int] = {}
        self.last_used: dict[bytes, int] = {}
        self.tick = 0

    def store(self, name: bytes, parent: bytes) -> None:
        assert name not in self.parents
        assert parent == ROOT or parent in self.parents
        self.parents[name], self.num_holders[name] = parent, 0

    def let_go(self, names: list[bytes]) -> None:
        for name in reversed(names):
            self.num_holders[name] -= 1
            if not self.num_holders[name]:
                self.tick += 1
                self.last_used[name] = self.tick

    def next_evicted(self) -> bytes:
        followed = set(self.parents.values())
        unheld = [
            name for name in self.parents if not self.num_holders[name] and name not in followed
        ]
        return min(unheld, key=self.last_used.__getitem__)


@pytest.mark.parametrize("seed", range(40))
def test_blocks_leave_in_the_order_of_their_use(seed: int) -> None:
    rng, blocks, num_removed = Random(seed), Blocks(), 0
    kv = KvManager(rng.choice((8, 20, 40)), SIZE, can_copy=False)
    held: dict[SeqId, list[bytes]] = {}
    for number in range(200):
        seq_id = SeqId(number)
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        chain = BlockChain(ROOT, SIZE)
        chain.extend(tokens)
        num_known = kv.match(chain, len(tokens) - 1)
        kv.admit(seq_id, chain, tokens, len(tokens) - 1)
        for name in chain.names[:num_known]:
            blocks.num_holders[name] += 1
        held[seq_id] = chain.names[:num_known]
        if kv.reserve(seq_id, len(tokens)):
            num_removed += settle(kv, blocks)
            for end in sorted({rng.randint(1, len(tokens)), len(tokens)}):
                kv.commit(seq_id, chain, end)
                num_removed += settle(kv, blocks)
                for name in chain.names[len(held[seq_id]) : end // SIZE]:
                    blocks.num_holders[name] += 1
                    held[seq_id] = [*held[seq_id], name]
        else:
            release(kv, blocks, held, seq_id)
        while held and rng.random() < 0.5:
            release(kv, blocks, held, rng.choice(list(held)))
        kv.check()
    assert num_removed > 20


def settle(kv: KvManager, blocks: Blocks) -> int:
    """Take what has become of blocks; how many left."""
    num_removed = 0
    for change in kv.drain_changes():
        if isinstance(change, BlocksStored):
            for name, parent in zip(change.names, (change.parent, *change.names), strict=False):
                blocks.store(name, parent)
        else:
            for name in change.names:
                assert name == blocks.next_evicted()
                del blocks.parents[name], blocks.num_holders[name]
            num_removed += len(change.names)
    return num_removed


def release(kv: KvManager, blocks: Blocks, held: dict[SeqId, list[bytes]], seq_id: SeqId) -> None:
    kv.release(seq_id)
    blocks.let_go(held.pop(seq_id))
