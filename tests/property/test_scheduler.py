"""Laws of the scheduler over random histories: the right tokens, conservation, budgets, an end for
everybody.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.base.events import Arrive, Cancel
from headrace.core.base.types import SeqId
from support.fake_device import Bench


def random_bench(rng: random.Random) -> Bench:
    return Bench(
        num_blocks=rng.choice([13, 20, 40]),
        max_model_len=50,
        prefix_cache=rng.random() < 0.8,
        can_copy=rng.random() < 0.7,
        step_tokens=rng.choice([1, 7, 32, 64]),
        chunk_tokens=rng.choice([0, 5, 16]),
        order=rng.choice(["fcfs", "priority", "longest_prefix", "slo_slack"]),
        admission=rng.choice(["predicted", "optimistic", "no_evict"]),
        predicted_output_tokens=rng.choice([0, 6, 30]),
        budget=rng.choice(["fixed", "itl"]),
        itl_target_ms=0.0012,
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


@settings(max_examples=300, deadline=None)
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
