"""KvManager: sharing, eviction order, tails, and all-or-nothing reservations."""

import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import BlocksRemoved, BlocksStored
from headrace.core.base.plan import BlockCopy
from headrace.core.base.types import SeqId
from headrace.core.kv.hit import Hit
from headrace.core.kv.manager import KvManager
from headrace.core.kv.names import BlockChain, root_name

ROOT = root_name("m", "bf16", 4, "", "")


def chain_of(tokens: list[int], root: bytes = ROOT) -> BlockChain:
    chain = BlockChain(root, 4)
    chain.extend(tokens)
    return chain


def hold(kv: KvManager, seq_id: int, tokens: list[int], root: bytes = ROOT) -> Hit:
    """Admit, reserve, compute and commit all of `tokens`."""
    chain = chain_of(tokens, root)
    hit = kv.admit(SeqId(seq_id), chain, tokens, len(tokens) - 1)
    assert kv.reserve(SeqId(seq_id), len(tokens))
    kv.commit(SeqId(seq_id), chain, len(tokens))
    kv.check()
    return hit


def test_a_second_sequence_shares_the_full_blocks_of_the_first() -> None:
    kv = KvManager(8, 4)
    assert hold(kv, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == Hit(0)
    assert hold(kv, 1, [1, 2, 3, 4, 5, 6, 7, 8, 10]) == Hit(8)
    assert kv.block_ids(SeqId(0))[:2] == kv.block_ids(SeqId(1))[:2]
    assert kv.block_ids(SeqId(0))[2] != kv.block_ids(SeqId(1))[2]
    assert kv.num_free == 4


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    kv = KvManager(8, 4)
    hold(kv, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    hit = hold(kv, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    assert hit.num_tokens == 7  # one block shared, three tokens of the next copied


def test_a_tail_is_copied_from_the_block_that_shares_most() -> None:
    kv = KvManager(8, 4)
    hold(kv, 0, [1, 2, 3, 4, 5, 6, 0, 0])
    hold(kv, 1, [1, 2, 3, 4, 5, 6, 7, 0])
    hit = kv.admit(SeqId(2), chain_of([1, 2, 3, 4, 5, 6, 7, 9, 9]), [1, 2, 3, 4, 5, 6, 7, 9, 9], 8)
    source, copied = kv.block_ids(SeqId(1))[1], kv.block_ids(SeqId(2))[1]
    assert hit == Hit(7, BlockCopy(source, copied, 3))
    kv.check()


def test_no_tail_where_the_executor_cannot_copy() -> None:
    kv = KvManager(8, 4, can_copy=False)
    hold(kv, 0, [1, 2, 3, 4, 5, 6, 0, 0])
    assert hold(kv, 1, [1, 2, 3, 4, 5, 6, 7, 0]) == Hit(4)


def test_nothing_is_shared_between_salts() -> None:
    kv = KvManager(8, 4)
    hold(kv, 0, [1, 2, 3, 4, 5], root_name("m", "bf16", 4, "", "alice"))
    assert hold(kv, 1, [1, 2, 3, 4, 5], root_name("m", "bf16", 4, "", "bob")) == Hit(0)


def test_released_blocks_stay_cached_and_leaves_go_before_parents() -> None:
    kv = KvManager(4, 4)
    hold(kv, 0, list(range(12)))
    first, second, third = kv.block_ids(SeqId(0))
    kv.release(SeqId(0))
    assert (kv.num_free, kv.num_cached) == (1, 3)
    kv.drain_changes()
    hold(kv, 1, [90, 91, 92, 93, 94, 95, 96, 97, 98])
    # The free block first, then the chain from its end.
    assert set(kv.block_ids(SeqId(1))) == {3, third, second}
    assert kv.match(chain_of(list(range(12))), 12) == 1
    names = chain_of(list(range(12))).names
    assert kv.drain_changes()[:1] == (BlocksRemoved((names[2], names[1])),)
    assert first not in kv.block_ids(SeqId(1))


def test_the_least_recently_used_chain_goes_first() -> None:
    kv = KvManager(4, 4)
    hold(kv, 0, [1, 1, 1, 1])
    hold(kv, 1, [2, 2, 2, 2])
    kv.release(SeqId(0))
    kv.release(SeqId(1))
    hold(kv, 2, [1, 1, 1, 1, 9])  # uses chain 1 again
    kv.release(SeqId(2))
    hold(kv, 3, [3, 3, 3, 3, 3, 3, 3, 3, 3])
    assert kv.match(chain_of([1, 1, 1, 1]), 4) == 1
    assert kv.match(chain_of([2, 2, 2, 2]), 4) == 0


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    kv = KvManager(3, 4)
    hold(kv, 0, [1, 2, 3, 4, 5])
    kv.admit(SeqId(1), chain_of([9, 9, 9, 9, 9]), [9, 9, 9, 9, 9], 4)
    assert not kv.reserve(SeqId(1), 5)
    assert kv.num_held(SeqId(1)) == 0
    assert kv.num_free == 1
    assert kv.reserve(SeqId(1), 4)
    kv.check()


def test_equal_blocks_computed_twice_become_one() -> None:
    kv = KvManager(8, 4)
    tokens = [1, 2, 3, 4, 5]
    chains = [chain_of(tokens), chain_of(tokens)]
    for seq_id, chain in enumerate(chains):
        kv.admit(SeqId(seq_id), chain, tokens, 4)
        assert kv.reserve(SeqId(seq_id), 5)
    assert kv.num_free == 4
    for seq_id, chain in enumerate(chains):
        kv.commit(SeqId(seq_id), chain, 5)
        kv.check()
    assert kv.block_ids(SeqId(0))[0] == kv.block_ids(SeqId(1))[0]
    assert kv.num_free == 5
    assert [type(change) for change in kv.drain_changes()] == [BlocksStored]


def test_match_is_a_query() -> None:
    kv = KvManager(4, 4)
    hold(kv, 0, [1, 1, 1, 1])
    hold(kv, 1, [2, 2, 2, 2])
    kv.release(SeqId(0))
    kv.release(SeqId(1))
    for _ in range(5):
        assert kv.match(chain_of([1, 1, 1, 1]), 4) == 1
    hold(kv, 2, [3] * 9)  # needs one eviction: still chain 1, the least recently held
    assert kv.match(chain_of([1, 1, 1, 1]), 4) == 0
    assert kv.match(chain_of([2, 2, 2, 2]), 4) == 1


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    kv = KvManager(4, 4, prefix_cache=False)
    hold(kv, 0, [1, 2, 3, 4, 5])
    kv.release(SeqId(0))
    assert (kv.num_free, kv.num_cached) == (4, 0)
    assert hold(kv, 1, [1, 2, 3, 4, 5]) == Hit(0)


def test_clear_cache_spares_what_is_held() -> None:
    kv = KvManager(8, 4)
    hold(kv, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    hold(kv, 1, [1, 2, 3, 4, 9, 9, 9, 9])
    kv.release(SeqId(1))
    assert kv.clear_cache() == 1
    kv.check()
    assert kv.match(chain_of([1, 2, 3, 4, 5, 6, 7, 8]), 8) == 2


def test_many_holds_do_not_grow_the_eviction_heap() -> None:
    kv = KvManager(4, 4)
    hold(kv, 0, [1, 2, 3, 4, 5])
    kv.release(SeqId(0))
    for seq_id in range(1, 5000):
        kv.admit(SeqId(seq_id), chain_of([1, 2, 3, 4, 5]), [1, 2, 3, 4, 5], 4)
        kv.release(SeqId(seq_id))
    assert len(kv._tree._leaves) < 1100
    kv.check()


def test_release_is_idempotent_and_double_admission_is_our_bug() -> None:
    kv = KvManager(4, 4)
    hold(kv, 0, [1, 2, 3])
    with pytest.raises(InvariantError):
        kv.admit(SeqId(0), chain_of([1]), [1], 0)
    kv.release(SeqId(0))
    kv.release(SeqId(0))
    kv.check()
    assert kv.num_free == 4


def test_check_finds_a_leaked_block() -> None:
    kv = KvManager(4, 4)
    kv._free.pop()
    with pytest.raises(InvariantError, match="block leak"):
        kv.check()
