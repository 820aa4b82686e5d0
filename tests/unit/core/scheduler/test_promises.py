"""What admission promised of a pool, on a pool of ten blocks of four tokens."""

import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.schema import SchedulerConfig
from headrace.core.kv.manager import KvManager
from headrace.core.kv.names import BlockChain
from headrace.core.scheduler.policies import promised_tokens
from headrace.core.scheduler.promises import Promises
from headrace.core.scheduler.sequence import Sequence
from headrace.core.scheduler.step import StepDraft

NUM_BLOCKS, BLOCK = 10, 4


class Pool:
    """Sequences that are admitted with all of their prompt."""

    def __init__(self, admission: str) -> None:
        self.config = SchedulerConfig(admission=admission)
        self.kv = KvManager(NUM_BLOCKS, BLOCK)
        self.running: dict[SeqId, Sequence] = {}
        self.promises = Promises(self.config, self.kv, self.running)

    def sequence(self, number: int, *, prompt: int, output: int) -> Sequence:
        spec = SeqSpec(
            seq_id=SeqId(number),
            request_id="",
            prompt_tokens=(number,) * prompt,
            params=SamplingParams(max_tokens=output),
        )
        seq = Sequence(spec, number, Ns(0), BlockChain(bytes(16), BLOCK))
        seq.promised_tokens = promised_tokens(self.config, seq)
        return seq

    def admit(self, seq: Sequence) -> None:
        self.kv.admit(seq.seq_id, seq.chain, seq.tokens, seq.reusable_tokens)
        assert self.kv.reserve(seq.seq_id, len(seq.tokens))
        seq.reset(len(seq.tokens))
        self.running[seq.seq_id] = seq


def test_a_promise_is_what_its_length_takes_and_is_not_held_yet() -> None:
    pool = Pool("no_evict")
    seq = pool.sequence(1, prompt=10, output=8)  # five blocks, of which the prompt holds three
    assert pool.promises.num_needed(seq) == 5
    pool.admit(seq)
    assert (pool.promises.num_left(seq), pool.promises.num_blocks) == (2, 2)
    seq.num_planned = 18
    assert pool.promises.num_left(seq) == 0


@pytest.mark.parametrize(("admission", "num_kept"), [("no_evict", 2), ("predicted", 0)])
def test_only_what_is_promised_for_good_is_kept(admission: str, num_kept: int) -> None:
    pool = Pool(admission)
    pool.admit(pool.sequence(1, prompt=10, output=8))
    assert (pool.promises.num_blocks, pool.promises.num_kept) == (2, num_kept)


def test_others_do_not_grow_into_what_is_kept() -> None:
    pool = Pool("predicted")
    safe, other = pool.sequence(1, prompt=10, output=8), pool.sequence(2, prompt=10, output=30)
    safe.num_times_victim = pool.config.max_preemptions
    pool.admit(safe)
    pool.admit(other)
    assert pool.kv.num_available == 4
    step = StepDraft(100)
    assert pool.promises.grow(other, 20, step)  # the two that nobody was promised
    assert not pool.promises.grow(other, 21, step)
    assert pool.promises.grow(safe, 18, step)
    assert not pool.promises.grow(other, 21, step)
    assert (pool.kv.num_available, pool.promises.num_kept) == (0, 0)


def test_a_promise_that_cannot_be_kept_is_a_fault() -> None:
    pool = Pool("no_evict")
    seq = pool.sequence(1, prompt=10, output=8)
    pool.admit(seq)
    with pytest.raises(InvariantError, match="promised blocks are gone"):
        pool.promises.grow(seq, NUM_BLOCKS * BLOCK + 1, StepDraft(100))
