"""KvManager against an oracle that keeps nothing but sets of token prefixes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.base.events import BlocksStored
from headrace.core.base.types import BlockId, SeqId
from headrace.core.kv.manager import KvManager
from headrace.core.kv.names import BlockChain, root_name

SIZE = 2
NUM_BLOCKS = 10
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


class KvMachine(RuleBasedStateMachine):
    """The oracle knows which prefixes are matchable from the reported changes and what each block
    contains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvManager(NUM_BLOCKS, SIZE)
        self.root = root_name("m", "bf16", SIZE, "", "")
        self.tokens: dict[SeqId, list[int]] = {}
        self.chains: dict[SeqId, BlockChain] = {}
        self.computed: dict[SeqId, int] = {}
        self.content: dict[tuple[BlockId, int], tuple[int, ...]] = {}
        self.matchable: set[bytes] = set()
        self.loads: dict[SeqId, tuple[BlockChain, list[int], int]] = {}
        self.leases: dict[SeqId, list[bytes]] = {}
        self.next_id = 0

    def write(self, seq_id: SeqId, start: int, end: int) -> None:
        tokens, blocks = self.tokens[seq_id], self.kv.block_ids(seq_id)
        for position in range(start, end):
            self.content[blocks[position // SIZE], position % SIZE] = tuple(tokens[: position + 1])

    @rule(tokens=TOKENS)
    def admit(self, tokens: list[int]) -> None:
        seq_id, self.next_id = SeqId(self.next_id), self.next_id + 1
        chain = BlockChain(self.root, SIZE)
        chain.extend(tokens)
        available = self.kv.num_available
        matched = self.kv.match(chain, len(tokens) - 1)
        assert matched == self.longest_match(chain, len(tokens) - 1)
        hit = self.kv.admit(seq_id, chain, tokens, len(tokens) - 1)
        assert matched * SIZE <= hit.num_tokens < len(tokens)
        if hit.copy is not None:
            for slot in range(hit.copy.num_tokens):
                self.content[hit.copy.dst, slot] = self.content[hit.copy.src, slot]
        if not self.kv.reserve(seq_id, len(tokens)):
            self.kv.release(seq_id)
            assert self.kv.num_available <= available
            self.settle()
            return
        self.tokens[seq_id], self.chains[seq_id], self.computed[seq_id] = (
            list(tokens),
            chain,
            hit.num_tokens,
        )
        self.settle()

    def longest_match(self, chain: BlockChain, limit: int) -> int:
        count = 0
        for name in chain.names[: limit // SIZE]:
            if name not in self.matchable:
                break
            count += 1
        return count

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        start, known = self.computed[seq_id], len(self.tokens[seq_id])
        if start == known:
            return
        end = data.draw(st.integers(start + 1, known))
        self.write(seq_id, start, end)
        self.computed[seq_id] = end
        self.kv.commit(seq_id, self.chains[seq_id], end)
        self.settle()

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data(), token=st.integers(0, 2))
    def grow(self, data: st.DataObject, token: int) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        held, free = self.kv.block_ids(seq_id), self.kv.num_available
        needed = self.kv.blocks_for(len(self.tokens[seq_id]) + 1) - len(held)
        fits = self.kv.reserve(seq_id, len(self.tokens[seq_id]) + 1)
        assert fits == (needed <= free)
        if fits:
            self.tokens[seq_id].append(token)
            self.chains[seq_id].extend(self.tokens[seq_id])
        else:
            assert self.kv.block_ids(seq_id) == held
        self.settle()

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        self.kv.release(seq_id)
        del self.tokens[seq_id], self.chains[seq_id], self.computed[seq_id]
        self.settle()

    @rule(tokens=TOKENS)
    def open_load(self, tokens: list[int]) -> None:
        load_id, self.next_id = SeqId(-1 - self.next_id), self.next_id + 1
        chain = BlockChain(self.root, SIZE)
        chain.extend(tokens)
        num_blocks, available = len(chain.names), self.kv.num_available
        matched = self.longest_match(chain, len(tokens))
        unheld = self.kv.num_unheld_of(chain, self.kv.match(chain, len(tokens)))
        num_known = self.kv.open_load(load_id, chain, num_blocks)
        fits = num_blocks - matched <= available - unheld
        assert num_known == (matched if matched < num_blocks and fits else None)
        if num_known is None:
            assert self.kv.num_available == available
        else:
            self.loads[load_id] = chain, tokens, num_known
        self.settle()

    @precondition(lambda self: bool(self.loads))
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        load_id = data.draw(st.sampled_from(sorted(self.loads)))
        chain, tokens, num_known = self.loads.pop(load_id)
        num_blocks = data.draw(st.integers(num_known, len(chain.names)))
        blocks = self.kv.block_ids(load_id)
        for position in range(num_known * SIZE, num_blocks * SIZE):
            self.content[blocks[position // SIZE], position % SIZE] = tuple(tokens[: position + 1])
        self.kv.commit(load_id, chain, num_blocks * SIZE)
        self.kv.release(load_id)
        self.settle()
        assert self.longest_match(chain, len(tokens)) >= num_blocks

    @precondition(lambda self: bool(self.tokens))
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        lease_id, self.next_id = SeqId(-1 - self.next_id), self.next_id + 1
        self.kv.lend(seq_id, lease_id)
        held = self.computed.pop(seq_id) // SIZE
        assert len(self.kv.block_ids(lease_id)) == held
        self.leases[lease_id] = self.chains.pop(seq_id).names[:held]
        del self.tokens[seq_id]
        self.settle()

    @precondition(lambda self: bool(self.leases))
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.kv.release(lease_id)
        del self.leases[lease_id]
        self.settle()

    @rule()
    def clear(self) -> None:
        self.kv.clear_cache()
        assert self.kv.num_cached == 0
        self.settle()

    def settle(self) -> None:
        for change in self.kv.drain_changes():
            assert change.names
            if isinstance(change, BlocksStored):
                assert len(change.block_ids) == len(change.names)
                assert self.matchable.isdisjoint(change.names)
                self.matchable.update(change.names)
            else:
                assert self.matchable.issuperset(change.names)
                self.matchable.difference_update(change.names)

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.kv.check()

    @invariant()
    def what_is_lent_stays(self) -> None:
        for names in self.leases.values():
            assert self.matchable.issuperset(names)

    @invariant()
    def every_sequence_reads_its_own_prefix(self) -> None:
        for seq_id, tokens in self.tokens.items():
            blocks = self.kv.block_ids(seq_id)
            for position in range(self.computed[seq_id]):
                assert self.content[blocks[position // SIZE], position % SIZE] == tuple(
                    tokens[: position + 1]
                )


KvMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestKvMachine = KvMachine.TestCase
