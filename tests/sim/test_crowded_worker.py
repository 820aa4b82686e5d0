"""One worker under more than it has room for (L01, L02, L04 to L07), over seeds: on a device that
knows the right tokens, with all laws checked after every event.
"""

from random import Random

import pytest

from headrace.core.base.events import Arrive
from headrace.core.base.request import AGING_NS
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.scheduler.twins import MIN_TWIN_BLOCKS
from support.fake_device import Bench
from support.seeds import FEW_AND_A_THOUSAND

pytestmark = pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)


def prompt(rng: Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(50) for _ in range(num_tokens))


def audit(bench: Bench) -> None:
    """Everybody has what it would have had alone, nothing is held, and one more is served."""
    bench.handle(Arrive((bench.seq((1, 2, 3), max_tokens=2),)))
    bench.run()
    bench.assert_outputs()
    assert len(bench.finished) + len(bench.rejected) == len(bench.specs)
    assert bench.core.stats().num_pinned_blocks == 0


def test_who_finds_the_queue_full_is_told_and_the_others_go_in_order(seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        limit = rng.randrange(5, 40)
        bench = Bench(max_waiting_seqs=limit, max_running_seqs=1, order="priority")
        num_too_many = rng.randrange(1, 10)
        specs = [
            bench.seq(prompt(rng, 5), max_tokens=2, priority=rng.randrange(3))
            for _ in range(limit + num_too_many)
        ]
        bench.handle(Arrive(tuple(specs)))
        late = {spec.seq_id for spec in specs[limit:]}
        assert bench.rejected.keys() == late
        for reject in bench.rejected.values():
            assert (reject.status_hint, reject.code) == (429, "queue_full")
            assert reject.retry_after_s is not None
        bench.run()
        waited = sorted(specs[:limit], key=lambda spec: (spec.priority, spec.seq_id))
        assert [one.seq_id for one in bench.admitted] == [spec.seq_id for spec in waited]
        audit(bench)


def test_fifty_in_a_pool_for_three(seeds: range) -> None:
    num_preemptions = 0
    for seed in seeds:
        rng = Random(seed)
        admission = rng.choice(("optimistic", "predicted"))
        bench = Bench(num_blocks=15, admission=admission, predicted_output_tokens=4)
        for _ in range(50):
            one = bench.seq(prompt(rng, rng.randrange(1, 5)), max_tokens=rng.randrange(1, 17))
            bench.handle(Arrive((one,)))
            if bench.plan is not None and rng.random() < 0.3:
                bench.step()
        bench.run()
        assert len(bench.finished) == 50
        most = bench.core.config.scheduler.max_preemptions
        assert max(finish.num_preemptions for finish in bench.finished.values()) <= most
        num_tokens = sum(
            len(spec.prompt_tokens) + spec.params.max_tokens for spec in bench.specs.values()
        )
        assert bench.core.stats().num_recomputed_tokens < 0.5 * num_tokens
        num_preemptions += len(bench.preempted)
        audit(bench)
    assert num_preemptions > len(seeds)


def test_what_can_never_fit_is_refused_at_once_and_is_in_nobodys_way(seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        bench = Bench(num_blocks=10, max_model_len=200)  # 40 tokens
        for _ in range(30):
            one = bench.seq(prompt(rng, rng.randrange(1, 40)), max_tokens=rng.randrange(1, 30))
            bench.handle(Arrive((one,)))
            fits = len(one.prompt_tokens) + one.params.max_tokens <= 40
            assert (one.seq_id in bench.rejected) is not fits
        for reject in bench.rejected.values():
            assert (reject.status_hint, reject.code) == (400, "kv_pool_too_small")
        bench.run()
        audit(bench)


def test_twins_are_computed_once(seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        bench = Bench(step_tokens=rng.choice((16, 64)), num_blocks=200)
        num_twins, num_prompt, num_output = rng.randrange(2, 9), rng.randrange(5, 60), 3
        shared = prompt(rng, num_prompt)
        twins = tuple(bench.seq(shared, max_tokens=num_output, seed=i) for i in range(num_twins))
        bench.handle(Arrive(twins))
        bench.run()
        # The last token is always computed, and nobody waits for less than this.
        is_short = (num_prompt - 1) // bench.spec.block_size < MIN_TWIN_BLOCKS
        own = (num_prompt if is_short else bench.spec.block_size) + num_output
        num_computed = bench.core.stats().num_computed_tokens
        assert num_computed <= num_prompt + num_twins * own
        audit(bench)


def test_nobody_waits_for_ever_behind_the_more_urgent(seeds: range) -> None:
    """Another urgent one comes whenever one begins. Steps take a second or so."""
    for seed in seeds:
        rng = Random(seed)
        bench = Bench(max_running_seqs=1, order="priority")
        gap, began = rng.randrange(1, 4), Ns(rng.randrange(5 * NS_PER_S))

        def urgent(bench: Bench = bench, rng: Random = rng) -> None:
            one = bench.seq(prompt(rng, 3), max_tokens=2, arrived_ns=bench.now)
            bench.handle(Arrive((one,)), after_ns=rng.randrange(NS_PER_S))

        for _ in range(3):
            urgent()
        bench.now = Ns(bench.now + began)
        low = bench.seq(prompt(rng, 3), max_tokens=2, priority=gap, arrived_ns=bench.now)
        bench.handle(Arrive((low,)))
        num_admitted = 0
        while low.seq_id not in {one.seq_id for one in bench.admitted}:
            bench.step()
            if len(bench.admitted) > num_admitted:
                num_admitted = len(bench.admitted)
                urgent()
            assert bench.now < low.arrived_ns + (gap + 1) * AGING_NS
        assert bench.now > low.arrived_ns + (gap - 1) * AGING_NS
        bench.run()
        audit(bench)


def test_no_schedule_changes_an_answer(seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        bench = Bench(
            num_blocks=rng.choice((20, 40, 300)),
            max_model_len=60,
            prefix_cache=rng.random() < 0.5,
            overlap=rng.choice(("off", "on")),
            max_running_seqs=rng.choice((1, 8, 64)),
            chunk_tokens=rng.choice((4, 16, 64)),
            step_tokens=rng.choice((64, 128)),
            admission=rng.choice(("predicted", "optimistic", "no_evict")),
        )
        stem = prompt(rng, 30)
        for index in range(40):
            shared = stem[: rng.randrange(30)]
            text = shared + prompt(rng, rng.randrange(1, 20))
            one = bench.seq(text, max_tokens=rng.randrange(1, 11), seed=index)
            bench.handle(Arrive((one,)))
            for _ in range(rng.randrange(3)):
                if bench.plan is not None:
                    bench.step()
        bench.run()
        assert len(bench.finished) == 40
        audit(bench)
