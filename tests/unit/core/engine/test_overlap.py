"""Steps that are planned while another one runs: what is known, what is not, and what is lost."""

import pytest

from headrace.core.base.events import Arrive, Cancel, EngineEffect, Finish, StepDone
from headrace.core.base.plan import PENDING, StepPlan, StepResult
from headrace.core.base.types import Ns, SeqId
from headrace.core.engine.core import MAX_STEP_FAILURES, OVERLAP_BELOW_NS
from support.fake_device import Bench, expected_output


def ahead(bench: Bench) -> StepPlan:
    assert len(bench.running) == 2, "no step was planned ahead"
    return bench.running[1]


def shares(plan: StepPlan) -> dict[int, tuple[int, ...]]:
    return {seq.seq_id: seq.tokens for seq in plan.seqs}


def finishes(effects: list[EngineEffect]) -> list[Finish]:
    return [effect for effect in effects if isinstance(effect, Finish)]


def test_the_next_step_is_planned_upon_a_token_that_is_not_known() -> None:
    bench = Bench(overlap="on")
    bench.handle(Arrive((bench.seq((1, 2, 3), max_tokens=5),)))
    assert shares(bench.running[0]) == {0: (1, 2, 3)}
    share = ahead(bench).seqs[0]
    assert (share.start, share.tokens) == (3, (PENDING,))
    assert share.sample is not None
    assert share.sample.position == 4
    bench.run()
    bench.assert_outputs()
    # Nothing was computed in vain: the end by length is known before it comes.
    assert len(bench.plans) == 5


def test_the_rest_of_a_prompt_is_planned_ahead() -> None:
    bench = Bench(overlap="on", step_tokens=4)
    bench.handle(Arrive((bench.seq(tuple(range(10)), max_tokens=1),)))
    assert shares(bench.running[0]) == {0: (0, 1, 2, 3)}
    assert shares(ahead(bench)) == {0: (4, 5, 6, 7)}
    bench.step()
    assert shares(ahead(bench)) == {0: (8, 9)}
    bench.run()
    bench.assert_outputs()


def test_a_row_behind_the_end_counts_for_nothing() -> None:
    bench = Bench(overlap="on", num_blocks=8)
    first = bench.seq((1, 2, 3, 4), max_tokens=9)
    stop = expected_output(first)[0]
    ending = bench.seq((1, 2, 3, 4), max_tokens=9, stop_token_ids=(stop,))
    bench.handle(Arrive((ending,)))
    (finish,) = finishes(bench.step())
    assert (finish.stop_token_id, finish.num_output_tokens) == (stop, 1)
    assert bench.core.stats().num_pinned_blocks == 0
    assert not bench.core.is_idle
    # Its blocks belong to whoever needs them, since the next step begins after this one.
    bench.handle(Arrive((bench.seq((5,) * 26, max_tokens=4),)))
    bench.run()
    assert bench.output[ending.seq_id] == (stop,)
    assert bench.core.is_idle
    bench.assert_outputs()


def test_a_cancelled_sequence_ends_with_the_oldest_step_that_holds_it() -> None:
    bench = Bench(overlap="on")
    bench.handle(Arrive((bench.seq((1,), max_tokens=9), bench.seq((2,), max_tokens=9))))
    bench.step()
    assert not finishes(bench.handle(Cancel(SeqId(0))))
    bench.handle(Cancel(SeqId(0)))
    num_tokens = len(bench.output[SeqId(0)])
    (finish,) = finishes(bench.step())
    assert (finish.seq_id, finish.reason) == (0, "cancelled")
    assert shares(ahead(bench)).keys() == {1}
    bench.run()
    assert len(bench.output[SeqId(0)]) == num_tokens
    bench.assert_outputs()


def test_a_cancelled_sequence_is_not_planned_again() -> None:
    bench = Bench(overlap="on")
    bench.handle(Arrive((bench.seq((1,), max_tokens=9),)))
    bench.handle(Arrive((bench.seq((2,) * 3, max_tokens=9),)))
    bench.step()
    assert shares(ahead(bench)).keys() == {0, 1}
    bench.handle(Cancel(SeqId(1)))
    assert not finishes(bench.step())
    assert shares(ahead(bench)).keys() == {0}
    (finish,) = finishes(bench.step())
    assert (finish.seq_id, finish.num_output_tokens) == (1, 0)
    bench.run()
    bench.assert_outputs()


def test_a_newcomer_joins_the_step_behind_the_one_that_runs() -> None:
    bench = Bench(overlap="on")
    bench.handle(Arrive((bench.seq((1,), max_tokens=1),)))
    bench.handle(Arrive((bench.seq((2, 3), max_tokens=2),)))
    assert shares(ahead(bench)) == {1: (2, 3)}
    bench.run()
    bench.assert_outputs()


def test_nobody_is_preempted_for_a_step_that_is_planned_ahead() -> None:
    bench = Bench(overlap="on", num_blocks=10, admission="optimistic")
    bench.handle(Arrive(tuple(bench.seq((i,) * 5, max_tokens=15, seed=i) for i in range(12))))
    num_alone = 0
    while bench.running:
        num_preempted = len(bench.preempted)
        bench.step()
        if len(bench.preempted) > num_preempted:
            # The step that preempted was planned when no other one ran.
            assert not bench.running[0].is_ahead
            num_alone += 1
    assert num_alone > 1
    assert len(bench.finished) == 12
    bench.assert_outputs()


def test_a_failed_step_takes_the_one_behind_it_along() -> None:
    bench = Bench(overlap="on")
    bench.handle(Arrive((bench.seq((1, 2), max_tokens=6), bench.seq((3,), max_tokens=6))))
    bench.step()
    bench.fail_step()
    assert len(bench.running) == 1, "planned upon a step that will fail"
    assert [preempted.seq_id for preempted in bench.preempted] == [0, 1]
    bench.handle(Arrive((bench.seq((4,), max_tokens=2),)))
    assert len(bench.running) == 1
    bench.step()
    assert not bench.running[0].is_ahead
    assert len(bench.preempted) == 2, "a sequence was preempted twice for one fault"
    bench.run()
    bench.assert_outputs()
    assert len(bench.finished) == 3


def test_faults_are_counted_once_for_both_steps() -> None:
    bench = Bench(overlap="on")
    bench.handle(Arrive((bench.seq((1, 2), max_tokens=6),)))
    for num_faults in range(1, MAX_STEP_FAILURES + 1):
        bench.fail_step()
        if bench.running:
            bench.step()
        assert (SeqId(0) in bench.finished) == (num_faults == MAX_STEP_FAILURES)
    assert bench.finished[SeqId(0)].reason == "error"
    assert bench.core.is_idle


def test_min_tokens_and_penalties_count_what_is_not_known_yet() -> None:
    bench = Bench(overlap="on")
    spec = bench.seq((1,), max_tokens=4, min_tokens=1, stop_token_ids=(60,), presence_penalty=1.0)
    bench.handle(Arrive((spec,)))
    first, second = bench.running[0].seqs[0].sample, ahead(bench).seqs[0].sample
    assert first is not None
    assert second is not None
    assert (first.banned, first.output_tokens) == ((60,), ())
    assert (second.banned, second.output_tokens) == ((), (PENDING,))
    bench.step()
    third = ahead(bench).seqs[0].sample
    assert third is not None
    assert third.output_tokens == (expected_output(spec)[0], PENDING)
    bench.run()
    bench.assert_outputs()


@pytest.mark.parametrize(
    ("elapsed_ns", "is_planned"), [(OVERLAP_BELOW_NS - 1, True), (OVERLAP_BELOW_NS, False)]
)
def test_auto_hides_the_host_behind_short_steps_that_only_decode(
    elapsed_ns: int, is_planned: bool
) -> None:
    bench = Bench(overlap="auto")

    def step() -> None:
        plan = bench.running.popleft()
        result = bench.device.run(plan)
        bench.handle(StepDone(StepResult(plan.step_id, result.seqs, Ns(elapsed_ns))))

    bench.handle(Arrive((bench.seq((1, 2, 3), max_tokens=9),)))
    assert len(bench.running) == 1  # a prompt is computed: it may be long
    step()
    assert (len(bench.running) == 2) == is_planned
    step()
    assert (len(bench.running) == 2) == is_planned
    bench.run()
    bench.assert_outputs()


def test_off_plans_nothing_ahead() -> None:
    bench = Bench(overlap="off")
    bench.handle(Arrive(tuple(bench.seq((i,), max_tokens=5) for i in range(3))))
    bench.run()
    assert not any(plan.is_ahead for plan in bench.plans)
