"""What a preempted sequence keeps, what it does not tell twice, and who may come meanwhile."""

from headrace.core.base.events import Admitted, Arrive, Cancel, EngineEffect
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import SeqId
from support.fake_device import Bench

NOTHING = Cancel(SeqId(-1))
LOW, HIGH, SMALL = SeqId(0), SeqId(1), SeqId(2)


def run_until_one_must_go(bench: Bench) -> list[EngineEffect]:
    """Both fit into 8 blocks until they have 16 tokens; then the lower priority has to go.

    The effects with which it goes.
    """
    while not bench.preempted:
        effects = bench.step()
    assert [one.seq_id for one in bench.preempted] == [LOW]
    return effects


def two(bench: Bench) -> tuple[SeqSpec, SeqSpec]:
    low = bench.seq((1,) * 12, max_tokens=12, priority=1)
    return low, bench.seq((2,) * 12, max_tokens=16, priority=0)


def planned(bench: Bench) -> set[SeqId]:
    assert bench.plan is not None
    return {share.seq_id for share in bench.plan.seqs}


def test_whoever_waits_again_has_not_waited_since_it_arrived() -> None:
    """By its arrival it would be old enough to hold up everybody behind it."""
    bench = Bench(num_blocks=8, admission="optimistic", skip_ahead_age_ms=0.001)  # 1 µs
    bench.handle(Arrive(two(bench)))
    bench.handle(NOTHING, after_ns=5000)
    run_until_one_must_go(bench)
    bench.handle(Arrive((bench.seq((3,), max_tokens=2),)))
    bench.step()
    assert planned(bench) == {HIGH, SMALL}
    bench.run()
    bench.assert_outputs()


def test_nobody_is_admitted_to_a_step_that_had_to_preempt() -> None:
    bench = Bench(num_blocks=8, admission="optimistic", max_running_seqs=2)
    bench.handle(Arrive((*two(bench), bench.seq((3,), max_tokens=2))))
    effects = run_until_one_must_go(bench)
    assert not [effect for effect in effects if isinstance(effect, Admitted)]
    assert planned(bench) == {HIGH}
    bench.step()  # there is room for the small one, and now it may come
    assert planned(bench) == {HIGH, SMALL}
    bench.run()
    bench.assert_outputs()


# ---- log probabilities of the prompt


def scored(bench: Bench, seq_id: int) -> list[int]:
    return [score.token_id for score in bench.prompt_scores[SeqId(seq_id)]]


def test_scores_are_told_once_where_a_block_was_scored_in_part() -> None:
    """Six are told when the step fails; the one whole block of four is found again."""
    bench = Bench(step_tokens=6)
    bench.handle(Arrive((bench.seq(tuple(range(20)), max_tokens=2, prompt_logprobs=0),)))
    bench.step()
    assert scored(bench, 0) == [1, 2, 3, 4, 5, 6]
    bench.fail_step()
    assert [hit.num_cached_tokens for hit in bench.admitted] == [0, 4]
    bench.run()
    assert scored(bench, 0) == list(range(1, 20))
    bench.assert_outputs()


def test_what_is_cached_is_computed_again_where_it_has_yet_to_be_scored() -> None:
    bench = Bench()
    prompt = tuple(range(20))
    bench.handle(Arrive((bench.seq(prompt, max_tokens=1),)))
    bench.run()
    bench.handle(Arrive((bench.seq(prompt, max_tokens=1, prompt_logprobs=0),)))
    bench.run()
    assert [hit.num_cached_tokens for hit in bench.admitted] == [0, 0]
    assert scored(bench, 1) == list(range(1, 20))


def test_a_prompt_that_is_scored_asks_for_no_more() -> None:
    bench = Bench()
    bench.handle(Arrive((bench.seq(tuple(range(10)), max_tokens=9, prompt_logprobs=0),)))
    for _ in range(8):  # 17 tokens are computed then
        bench.step()
    bench.fail_step()
    assert [hit.num_cached_tokens for hit in bench.admitted] == [0, 16]
    assert [share.prompt_logprobs for plan in bench.plans for share in plan.seqs][1:] == [None] * 9
    bench.run()
    bench.assert_outputs()
