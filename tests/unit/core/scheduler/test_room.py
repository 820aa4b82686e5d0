"""Room for prompts, asked directly: a step takes 1000 ns and 10 ns a token."""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.base.plan import SeqStep, StepPlan
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.learned import MIN_SAMPLES, LearnedCost
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.kv.names import BlockChain
from headrace.core.scheduler.lanes import QUIET_STEPS, ShortShare
from headrace.core.scheduler.room import (
    UNKNOWN_STEP_TOKENS,
    Company,
    Room,
    most_within,
    room_of,
)
from headrace.core.scheduler.sequence import Sequence
from support.fake_device import LinearCost


def sequence(order: int, num_computed: int, *, num_prompt: int, itl_ms: float | None) -> Sequence:
    spec = SeqSpec(
        seq_id=SeqId(order),
        request_id="",
        prompt_tokens=(1,) * num_prompt,
        params=SamplingParams(max_tokens=100),
        slo=Slo(itl_ms=itl_ms),
    )
    seq = Sequence(spec, order, Ns(0), BlockChain(bytes(16), 4))
    seq.reset(num_computed)
    return seq


def decoding(order: int, *, itl_ms: float | None = None) -> Sequence:
    """A sequence of 100 tokens that needs one more step for its next one."""
    seq = sequence(order, 0, num_prompt=50, itl_ms=itl_ms)
    seq.tokens += [1] * 50
    seq.reset(99)
    return seq


def prompt(num_computed: int = 0, *, num_prompt: int = 10_000, is_long: bool = False) -> Sequence:
    seq = sequence(9, num_computed, num_prompt=num_prompt, itl_ms=None)
    seq.is_long = is_long
    return seq


def room(
    *seqs: Sequence,
    prompts: tuple[Sequence, ...] = (),
    share: ShortShare | None = None,
    cost: CostModel | None = None,
    **settings: Any,
) -> Room:
    config = SchedulerConfig(**{"itl_margin": 0.0, **settings})
    learned = LearnedCost(cost or LinearCost())
    company = Company.of(seqs, config.itl_target_ms)
    return room_of(config, learned, company, prompts, share or ShortShare(0.75))


def num_short(*seqs: Sequence, **settings: Any) -> int:
    return room(*seqs, **settings).short(has_long=False)


def test_the_room_keeps_the_tightest_target() -> None:
    assert num_short(decoding(0), itl_target_ms=0.0015) == 49
    assert num_short(decoding(0), decoding(1, itl_ms=0.0012), itl_target_ms=0.0015) == 18
    # A request that states a wider one does not stretch those that state none.
    assert num_short(decoding(0), decoding(1, itl_ms=9.0), itl_target_ms=0.0015) == 48


def test_the_room_leaves_a_margin() -> None:
    assert num_short(decoding(0), itl_target_ms=0.002, itl_margin=0.1) == 79


def test_prefill_never_stops() -> None:
    seqs = [decoding(i) for i in range(4)]
    # 1040 ns without prefill, so there is time for none.
    assert num_short(*seqs, itl_target_ms=0.001045, min_prefill_tokens=3) == 3
    # Decoding alone misses the target, so prefill has as much time: 2080 ns for all.
    assert num_short(*seqs, itl_target_ms=0.00103, min_prefill_tokens=3) == 104
    assert num_short(*seqs, itl_target_ms=0.00001, min_prefill_tokens=3) == 104


def test_no_step_exceeds_step_tokens() -> None:
    seqs = [decoding(i) for i in range(4)]
    assert num_short(*seqs, itl_target_ms=1000.0, step_tokens=64) == 60
    assert num_short(*seqs, itl_target_ms=0.001, step_tokens=5, min_prefill_tokens=50) == 1


def test_without_decoding_only_long_prompts_are_cut() -> None:
    assert room(prompts=(prompt(),), itl_target_ms=0.001).short(has_long=False) == 512
    alone = room(prompts=(prompt(is_long=True),), long_step_ms=0.002)
    assert alone.long(0, is_empty=True) == 100
    # A sequence that is about to have its first token has no gap between tokens to keep short.
    first = prompt(9, num_prompt=10)
    assert room(first, prompts=(prompt(),), itl_target_ms=0.001).short(has_long=False) == 512


def test_steps_of_long_prompts_are_shorter_while_short_ones_come() -> None:
    """3000 ns for a step, and two fifths of it: 1000 and 10 for each token."""
    share, long = ShortShare(0.75), (prompt(is_long=True),)

    def num_long(num_short: int, *seqs: Sequence) -> int:
        step = room(*seqs, prompts=long, share=share, long_step_ms=0.003, itl_target_ms=0.003)
        return step.long(num_short, is_empty=False)

    assert num_long(0) == 200
    num_long(50)
    assert num_long(0) == 20
    # It is not a matter of steps in which somebody decodes, and whose target counts.
    assert [num_long(0, decoding(0)) for _ in range(QUIET_STEPS)] == [199] * QUIET_STEPS
    assert [num_long(0) for _ in range(QUIET_STEPS)] == [20] * (QUIET_STEPS - 1) + [200]


def test_lanes_share_the_time_and_leave_each_other_the_rest() -> None:
    """2010 ns: 100 tokens beside the one that decodes, of which three quarters are guaranteed."""
    seqs, long = (decoding(0),), (prompt(is_long=True),)
    assert room(*seqs, prompts=long, itl_target_ms=0.00201).short(has_long=True) == 75
    assert room(*seqs, prompts=long, itl_target_ms=0.00201).long(75, is_empty=False) == 25
    assert room(*seqs, prompts=long, itl_target_ms=0.00201).long(10, is_empty=False) == 90
    assert room(*seqs, prompts=long, itl_target_ms=0.00201).rest(75, 10) == 15
    # Where tokens are what a step is short of, as many are kept for the long lane.
    assert room(prompts=long, step_tokens=40).short(has_long=True) == 30
    assert room(prompts=long, budget="fixed", step_tokens=40).short(has_long=True) == 30


class FarCost(LinearCost):
    """A token costs one ns more for each that it attends to."""

    def step_ns(self, shape: StepShape) -> Ns:
        return Ns(1000 + 10 * shape.num_tokens + shape.num_attention_pairs)


def test_a_far_prompt_is_owed_the_time_that_a_piece_of_it_takes() -> None:
    """A token of it takes 10,001 ns, of which each step leaves it 275."""
    share = ShortShare(0.75)
    long = prompt(9_990, is_long=True)
    pieces = []
    for _ in range(37):
        step = room(
            decoding(0), prompts=(long,), share=share, cost=FarCost(), itl_target_ms=0.00211
        )
        assert step.short(has_long=True) == 29
        pieces.append(step.long(29, is_empty=False))
    assert pieces == [0] * 36 + [1]
    # With nothing else to do, it need not wait.
    step = room(prompts=(long,), share=share, cost=FarCost(), long_step_ms=0.001)
    assert step.long(0, is_empty=True) == 1


def test_a_piece_is_worth_reading_what_is_before_it() -> None:
    """Where reading takes as long as 5 tokens, so many are computed for it."""

    class ReadingCost(LinearCost):
        def step_ns(self, shape: StepShape) -> Ns:
            return Ns(1000 + 100 * shape.num_tokens + 500 * (shape.num_kv_tokens > 5_000))

    long = prompt(9_000, is_long=True)
    step = room(decoding(0), prompts=(long,), cost=ReadingCost(), itl_target_ms=0.00111)
    assert step.long(0, is_empty=True) == 6


def test_a_chunk_far_into_its_prompt_is_predicted_with_what_it_attends_to() -> None:
    cost = LearnedCost(FittedCostModel.prior())
    for _ in range(MIN_SAMPLES):
        cost.learn(StepPlan(StepId(1), (SeqStep(SeqId(0), 0, (0,) * 20, ()),)), Ns(15_000_000))

    def num_long(start: int) -> int:
        prompts = (prompt(start, is_long=True),)
        company = Company.of([decoding(0)], 50.0)
        step = room_of(SchedulerConfig(), cost, company, prompts, ShortShare(0.75))
        return step.long(0, is_empty=False)

    assert num_long(8000) < num_long(0)


def test_a_step_is_small_while_its_time_is_a_guess() -> None:
    guess = FittedCostModel.prior()
    seqs = (decoding(0),)
    assert room(*seqs, cost=guess).short(has_long=False) == UNKNOWN_STEP_TOKENS
    assert room(*seqs, cost=guess, step_tokens=64).short(has_long=False) == 63


def test_the_fixed_policy_takes_whole_steps() -> None:
    assert num_short(decoding(0), budget="fixed", itl_target_ms=0.001) == 511


@given(rises=st.lists(st.sampled_from((0, 1, 1, 2, 50, 1000)), max_size=200), limit=st.integers())
def test_most_within_finds_what_looking_at_each_would(rises: list[int], limit: int) -> None:
    costs = list(accumulate(rises))
    looked_at: list[int] = []

    def cost(num: int) -> float:
        looked_at.append(num)
        return costs[num - 1]

    assert most_within(limit, len(costs), cost) == bisect_right(costs, limit)
    assert len(looked_at) <= 2 + 3 * 8


def test_most_within_looks_at_few_where_costs_are_straight() -> None:
    looked_at: list[int] = []

    def cost(num: int) -> float:
        looked_at.append(num)
        return 5e6 + 3e5 * num + 0.2 * num * num

    assert cost(most := most_within(1e8, 2048, cost)) <= 1e8 < cost(most + 1)
    assert len(looked_at) <= 8
