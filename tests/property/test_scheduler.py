"""Laws of the scheduler over random histories: the right tokens, conservation, budgets, an end for
everybody.
"""

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.core.base.events import Arrive, Cancel
from headrace.core.base.types import NS_PER_MS, SeqId
from headrace.core.cost.model import StepShape
from headrace.core.scheduler.burst import BURST_NS
from support.fake_device import Bench, LinearCost


def random_bench(rng: random.Random) -> Bench:
    return Bench(
        num_blocks=rng.choice([13, 20, 40]),
        max_model_len=50,
        prefix_cache=rng.random() < 0.8,
        can_copy=rng.random() < 0.7,
        overlap=rng.choice(["off", "on", "auto"]),
        step_tokens=rng.choice([1, 7, 32, 64]),
        chunk_tokens=rng.choice([0, 5, 16]),
        order=rng.choice(["fcfs", "priority", "longest_prefix", "slo_slack"]),
        admission=rng.choice(["predicted", "optimistic", "no_evict"]),
        predicted_output_tokens=rng.choice([0, 6, 30]),
        budget=rng.choice(["fixed", "itl"]),
        itl_target_ms=0.0012,
        itl_margin=rng.choice([0.0, 0.1]),
        min_prefill_tokens=rng.choice([1, 8]),
        long_step_ms=rng.choice([0.001, 0.0012, 250.0]),
        short_prompt_tokens=rng.choice([0, 8, 512]),
        short_prompt_share=rng.choice([0.01, 0.5, 0.99]),
        max_long_prefills=rng.choice([1, 2, 50]),
        max_running_seqs=rng.choice([1, 3, 64]),
        max_preemptions=rng.choice([0, 1, 2]),
        skip_ahead_window=rng.choice([0, 2, 64]),
        skip_ahead_age_ms=rng.choice([0, 0.001, 1000]),
    )


def arrive(bench: Bench, rng: random.Random, prefixes: list[tuple[int, ...]]) -> None:
    specs = []
    for _ in range(rng.randint(1, 4)):
        prompt = rng.choice(prefixes)[: rng.randint(1, 16)]
        prompt += tuple(rng.randrange(3) for _ in range(rng.randint(0, 14)))
        max_tokens = rng.randint(1, 20)
        specs.append(
            bench.seq(
                prompt,
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, max_tokens // 2]),
                seed=rng.randrange(3),
                priority=rng.randint(0, 2),
                eos_token_ids=(rng.randrange(50), rng.randrange(50)),
                prompt_logprobs=rng.choice([None, None, None, 1]),
                frequency_penalty=rng.choice([0.0, 0.5]),
            )
        )
    bench.handle(Arrive(tuple(specs)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_laws(seed: int) -> None:
    rng = random.Random(seed)
    bench = random_bench(rng)
    prefixes = [tuple(rng.randrange(3) for _ in range(16)) for _ in range(2)]
    cancelled: set[SeqId] = set()
    num_failed_steps = 0
    for _ in range(rng.randint(1, 60)):
        chance = rng.random()
        if chance < 0.35:
            arrive(bench, rng, prefixes)
        elif chance < 0.42 and bench.specs:
            seq_id = SeqId(rng.randrange(len(bench.specs) + 1))
            cancelled.add(seq_id)
            bench.handle(Cancel(seq_id))
        elif bench.plan is not None:
            if chance < 0.45:
                num_failed_steps += 1
                bench.fail_step()
            else:
                bench.step()
    bench.run()

    assert not bench.rejected
    assert bench.finished.keys() == bench.specs.keys()
    bench.assert_outputs()
    for seq_id, finish in bench.finished.items():
        assert finish.reason in ("stop", "length", "error") or seq_id in cancelled
        assert finish.num_output_tokens == len(bench.output.get(seq_id, ()))
        if finish.reason == "error":
            assert num_failed_steps >= 3
        spec = bench.specs[seq_id]
        if spec.params.prompt_logprobs is not None and finish.reason in ("stop", "length"):
            assert [score.token_id for score in bench.prompt_scores[seq_id]] == list(
                spec.prompt_tokens[1:]
            )
        # A sequence that was preempted as often as allowed is promised all it needs.
        allowed = bench.core.config.scheduler.max_preemptions
        assert finish.num_preemptions <= allowed + num_failed_steps
    scheduler = bench.core.config.scheduler
    for plan in bench.plans:
        assert len(plan.seqs) <= scheduler.max_running_seqs
        assert plan.num_tokens <= scheduler.step_tokens
    assert bench.core.stats().num_pinned_blocks == 0


@settings(max_examples=20, deadline=None)
@example(0, 0.25, 0.296875, 17, 12)
@example(0, 0.0625, 0.296875, 17, 1)
@example(0, 0.05, 0.0, 1, 1)
@given(
    st.integers(0, 2**32),
    st.floats(0.05, 0.95),
    st.floats(0.0, 0.3),
    st.integers(1, 40),
    st.integers(0, 12),
)
def test_a_long_prompt_advances_beside_any_number_of_short_ones(
    seed: int, share: float, margin: float, least: int, num_decoding: int
) -> None:
    """It gets its lane's share of the prompt tokens that every step has time for, however many
    short ones come; and no step takes longer than the target of those that decode, but for the
    least that prefill gets.
    """
    rng = random.Random(seed)
    bench = Bench(
        num_blocks=2000,
        max_model_len=2000,
        step_tokens=200,
        short_prompt_tokens=32,
        short_prompt_share=share,
        itl_target_ms=0.0018,  # that is 80 tokens
        itl_margin=margin,
        min_prefill_tokens=least,
        max_long_prefills=1,
        prefix_cache=False,
    )
    decoding = [bench.seq((i,), max_tokens=400, ignore_eos=True) for i in range(num_decoding)]
    long = bench.seq((1,) * 1500, max_tokens=1)
    if decoding:
        bench.handle(Arrive(tuple(decoding)))
        bench.step()
    bench.handle(Arrive((long,)), after_ns=BURST_NS)
    limit_ns = 0.0018 * (1.0 - margin) * NS_PER_MS
    # By `LinearCost`, and nearly by what is learned from it.
    num_fitting = (0.98 * limit_ns - 1000) / 10 - num_decoding if decoding else float("inf")
    num_due = num_long_tokens = 0.0
    bench.step()
    for _ in range(40):
        shorts = tuple(bench.seq((5,) * rng.randint(2, 32), max_tokens=1) for _ in range(9))
        bench.handle(Arrive(shorts), after_ns=BURST_NS)
        assert bench.plan is not None
        shares = {seq.seq_id: len(seq.tokens) for seq in bench.plan.seqs}
        num_prefill = bench.plan.num_tokens - sum(seq.seq_id in shares for seq in decoding)
        assert all(shares[seq.seq_id] == 1 for seq in decoding)
        # Shares are rounded up.
        if decoding and num_prefill > least + 1:
            # What is learned from steps comes close to the line that they lie on; and short ones
            # get their part of the least, which is 10 ns a token, beside what the long one is due.
            most_ns = limit_ns * 1.02 + 10 * (share * least + 1)
            assert LinearCost().step_ns(StepShape.of(bench.plan)) <= most_ns
        num_due += (1.0 - share) * min(num_prefill, num_fitting)
        num_long_tokens += shares.get(long.seq_id, 0)
        if num_long_tokens < 1000:
            assert num_long_tokens >= num_due - 200 * share - 2
        bench.step()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_history_gives_the_same_effects(seed: int) -> None:
    def effects() -> list[object]:
        rng = random.Random(seed)
        bench = random_bench(rng)
        arrive(bench, rng, [(1,) * 16])
        arrive(bench, rng, [(1,) * 16])
        bench.run()
        return [bench.plans, bench.output, bench.finished]

    assert effects() == effects()
