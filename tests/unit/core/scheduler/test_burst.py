"""Who comes together to an idle engine: a step takes 1000 ns and 10 ns a token."""

from headrace.core.base.events import Arrive
from headrace.core.base.request import Slo
from headrace.core.scheduler.burst import BURST_NS
from support.fake_device import Bench, shares


def test_who_comes_together_gives_way_to_each_others_first_tokens() -> None:
    bench = Bench(
        itl_target_ms=0.0015,
        itl_margin=0.0,
        long_step_ms=0.003,
        step_tokens=400,
        num_blocks=900,
        max_model_len=2000,
        prefix_cache=False,
    )
    bench.handle(Arrive(tuple(bench.seq((i,) * 250, max_tokens=50) for i in range(3))))
    assert shares(bench.plan) == {0: 250, 1: 150}
    bench.step()
    assert shares(bench.plan) == {0: 1, 1: 100, 2: 99}  # 3000 ns, of long_step_ms
    # A request that states a limit has it kept, by those who came with it, too.
    bench.handle(Arrive((bench.seq((4,) * 3, max_tokens=50, slo=Slo(itl_ms=0.0014)),)))
    bench.step()
    assert shares(bench.plan) == {0: 1, 1: 1, 2: 151, 3: 3}
    bench.step()
    assert shares(bench.plan) == {0: 1, 1: 1, 2: 1, 3: 1}
    # Whoever comes later finds them protected.
    bench.handle(Arrive((bench.seq((5,) * 120, max_tokens=1),)), after_ns=BURST_NS)
    bench.step()
    assert shares(bench.plan) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 36}


def with_long_prompts() -> Bench:
    return Bench(
        itl_target_ms=0.0015,
        itl_margin=0.0,
        step_tokens=400,
        short_prompt_tokens=100,
        num_blocks=900,
        max_model_len=2000,
    )


def test_nobody_gives_way_to_a_long_prompt_that_came_first() -> None:
    bench = with_long_prompts()
    bench.handle(Arrive((bench.seq((1,) * 1500, max_tokens=1), bench.seq((2,), max_tokens=9))))
    bench.step()
    bench.step()
    assert bench.plan is not None
    assert bench.plan.num_tokens <= 50


def test_nor_to_one_that_comes_with_others_and_was_not_looked_at_yet() -> None:
    bench = with_long_prompts()
    bench.handle(Arrive((bench.seq((2,), max_tokens=9),)))
    bench.handle(Arrive((bench.seq((1,) * 1500, max_tokens=1),)))
    bench.step()
    assert bench.plan is not None
    assert 1 < bench.plan.num_tokens <= 50
