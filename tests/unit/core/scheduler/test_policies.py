"""Policies are functions: asked directly."""

from headrace.core.base.plan import SeqStep, StepPlan
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.learned import MIN_SAMPLES, LearnedCost
from headrace.core.kv.names import BlockChain
from headrace.core.scheduler.policies import (
    UNKNOWN_STEP_TOKENS,
    choose_victim,
    promised_tokens,
    step_budget,
)
from headrace.core.scheduler.sequence import Sequence
from support.fake_device import LinearCost


def sequence(
    order: int, *, num_computed: int = 0, priority: int = 0, preemptions: int = 0
) -> Sequence:
    spec = SeqSpec(
        seq_id=SeqId(order),
        request_id="",
        prompt_tokens=(1,) * 10,
        params=SamplingParams(max_tokens=100),
        priority=priority,
    )
    seq = Sequence(spec, order, Ns(0), BlockChain(b"", 4))
    seq.reset(num_computed)
    seq.num_times_victim = preemptions
    return seq


def test_promises() -> None:
    seq = sequence(0)
    seq.tokens += [1] * 30
    assert promised_tokens(SchedulerConfig(admission="no_evict"), seq) == 110
    assert promised_tokens(SchedulerConfig(admission="optimistic"), seq) == 40
    assert (
        promised_tokens(SchedulerConfig(admission="predicted", predicted_output_tokens=50), seq)
        == 60
    )
    assert (
        promised_tokens(SchedulerConfig(admission="predicted", predicted_output_tokens=5), seq)
        == 40
    )
    assert (
        promised_tokens(SchedulerConfig(admission="predicted", predicted_output_tokens=500), seq)
        == 110
    )
    tired = sequence(1, preemptions=2)
    assert promised_tokens(SchedulerConfig(admission="optimistic", max_preemptions=2), tired) == 110


def test_the_victim_has_the_lowest_priority_then_the_least_lost_work() -> None:
    seqs = [sequence(0, num_computed=9), sequence(1, num_computed=5), sequence(2, num_computed=5)]
    assert choose_victim(seqs, None) is seqs[2]  # the younger of two
    assert choose_victim(seqs, 2) is seqs[1]  # never the same twice in a row
    assert choose_victim(seqs[2:], 2) is seqs[2]  # unless it is the only one
    assert choose_victim([*seqs, sequence(3, num_computed=99, priority=1)], None) is not seqs[2]
    assert choose_victim([], None) is None


def decoding(order: int, *, itl_ms: float | None = None) -> Sequence:
    """A sequence of 100 tokens that needs one more step for its next one."""
    spec = SeqSpec(
        seq_id=SeqId(order),
        request_id="",
        prompt_tokens=(1,) * 50,
        params=SamplingParams(max_tokens=100),
        slo=Slo(itl_ms=itl_ms),
    )
    seq = Sequence(spec, order, Ns(0), BlockChain(b"", 4))
    seq.tokens += [1] * 50
    seq.reset(99)
    return seq


def budget(*seqs: Sequence, prompts: tuple[Sequence, ...] = (), **settings: float) -> int:
    """A step takes 1000 ns and 10 ns a token."""
    config = SchedulerConfig(itl_margin=0.0, **settings)  # type: ignore[arg-type]
    return step_budget(config, LearnedCost(LinearCost()), seqs, prompts)


def test_the_budget_keeps_the_tightest_target() -> None:
    assert budget(decoding(0), itl_target_ms=0.0015) == 50
    assert budget(decoding(0), decoding(1, itl_ms=0.0012), itl_target_ms=0.0015) == 20
    # A request that states a wider one does not stretch those that state none.
    assert budget(decoding(0), decoding(1, itl_ms=9.0), itl_target_ms=0.0015) == 50


def test_the_budget_leaves_a_margin() -> None:
    config = SchedulerConfig(itl_target_ms=0.002, itl_margin=0.1)
    assert step_budget(config, LearnedCost(LinearCost()), [decoding(0)], ()) == 80


def test_prefill_never_stops() -> None:
    seqs = [decoding(i) for i in range(4)]
    # 1040 ns without prefill, so there is time for none.
    assert budget(*seqs, itl_target_ms=0.001045, min_prefill_tokens=3) == 4 + 3
    # Decoding alone misses the target, so prefill has as much time: 2080 ns for all.
    assert budget(*seqs, itl_target_ms=0.00103, min_prefill_tokens=3) == 108
    assert budget(*seqs, itl_target_ms=0.00001, min_prefill_tokens=3) == 108


def test_no_budget_exceeds_step_tokens() -> None:
    seqs = [decoding(i) for i in range(4)]
    assert budget(*seqs, itl_target_ms=1000.0, step_tokens=64) == 64
    assert budget(*seqs, itl_target_ms=0.001, step_tokens=5, min_prefill_tokens=50) == 5


def test_without_decoding_only_long_prompts_are_cut() -> None:
    prompt = sequence(0)
    assert budget(prompts=(prompt,), itl_target_ms=0.001) == 512
    prompt.is_long = True
    assert budget(prompts=(prompt,), long_step_ms=0.002) == 100
    # A sequence that is about to have its first token has no gap between tokens to keep short.
    first = sequence(1, num_computed=9)
    assert budget(first, prompts=(sequence(2),), itl_target_ms=0.001) == 512


def test_a_chunk_far_into_its_prompt_is_predicted_with_what_it_attends_to() -> None:
    cost = LearnedCost(FittedCostModel.prior())
    for _ in range(MIN_SAMPLES):
        cost.learn(StepPlan(StepId(1), (SeqStep(SeqId(0), 0, (0,) * 20, ()),)), Ns(15_000_000))
    config = SchedulerConfig()
    near, far = sequence(1), sequence(2, num_computed=8000)
    assert step_budget(config, cost, [decoding(0)], [far]) < step_budget(
        config, cost, [decoding(0)], [near]
    )


def test_a_step_is_small_while_its_time_is_a_guess() -> None:
    guess = LearnedCost(FittedCostModel.prior())
    config = SchedulerConfig(itl_target_ms=0.01)
    assert step_budget(config, guess, [decoding(0)], ()) == 1 + UNKNOWN_STEP_TOKENS
    assert step_budget(SchedulerConfig(step_tokens=64), guess, [decoding(0)], ()) == 64


def test_the_fixed_policy_takes_whole_steps() -> None:
    fixed = SchedulerConfig(budget="fixed", itl_target_ms=0.001)
    assert step_budget(fixed, LearnedCost(LinearCost()), [decoding(0)], ()) == 512
