"""A step that was planned ahead: its time begins when the step before it ends."""

from headrace.core.base.events import Admitted, Cancel, Emit, Finish, StartStep, StepDone
from headrace.core.base.plan import PENDING, SeqStep, StepPlan, StepResult
from headrace.core.base.request import FinishReason
from headrace.core.base.types import Ns, SeqId, StepId
from support.engine_script import MS, PROMPT, Script

A, B, NOBODY = SeqId(0), SeqId(1), SeqId(-1)
FIRST = StepPlan(StepId(0), (SeqStep(A, 0, (7,) * PROMPT, ()),))
AHEAD = StepPlan(
    StepId(1),
    (SeqStep(A, PROMPT, (PENDING,), ()), SeqStep(B, 0, (7,) * PROMPT, ())),
    is_ahead=True,
)


def done(plan: StepPlan) -> StepDone:
    return StepDone(StepResult(plan.step_id, (), Ns(0)))


def finish(seq_id: SeqId, num_output: int) -> Finish:
    return Finish(seq_id, FinishReason.LENGTH, PROMPT, num_output, 0, 0)


def test_a_step_planned_ahead_begins_when_the_one_before_it_ends() -> None:
    script = Script()
    script.arrive(A, B)
    script.admit(A)
    script.see(Cancel(NOBODY), StartStep(FIRST), Admitted(B, 0), StartStep(AHEAD))
    script.wait(66)
    script.see(done(FIRST), Emit(A, (7,)))
    script.wait(67)
    script.see(done(AHEAD), Emit(A, (7,)), Emit(B, (7,)), finish(A, 2), finish(B, 1))
    ahead, behind = script.records[A], script.records[B]
    assert ahead.time.own_prefill_ns == 66 * MS
    assert (ahead.ttft_ns, ahead.e2e_ns) == (66 * MS, 133 * MS)
    # Until the second step begins, it waits for the first one's prefill.
    assert behind.time.others_prefill_ns == 66 * MS
    assert behind.time.own_prefill_ns == 66 * MS
    for record in (ahead, behind):
        assert record.time.total_ns == record.e2e_ns == 133 * MS


def test_a_sequence_that_has_ended_is_charged_for_no_row_behind_its_end() -> None:
    script = Script()
    script.arrive(A, B)
    script.admit(A)
    script.see(Cancel(NOBODY), StartStep(FIRST), Admitted(B, 0), StartStep(AHEAD))
    script.wait(66)
    script.see(done(FIRST), Emit(A, (7,)), finish(A, 1))
    assert script.records[A].e2e_ns == 66 * MS
    script.wait(67)
    script.see(done(AHEAD), Emit(B, (7,)), finish(B, 1))
    assert script.records[B].time.total_ns == 133 * MS
