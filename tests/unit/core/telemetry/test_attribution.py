"""Delays of known size, injected at one place each, are found at that place (within 5 %)."""

import pytest

from headrace.core.base.events import (
    Arrive,
    Cancel,
    CopyDone,
    Emit,
    Finish,
    Preempted,
    Reject,
    StartCopy,
    StartStep,
    StepDone,
)
from headrace.core.base.metrics import Metric
from headrace.core.base.plan import SeqStep, StepPlan, StepResult
from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.telemetry import Cause, RequestRecord
from support.engine_script import MS, PROMPT, Script, spec


def times_ms(record: RequestRecord) -> dict[str, float]:
    """The parts that are not 0."""
    return {cause: ns / MS for cause, ns in record.time.by_cause().items() if ns}


# ---- one delay in each stage

QUIET = {"own_prefill": 66.0, "decode": 9.0}


def test_an_undisturbed_sequence_has_its_own_work_only() -> None:
    script = Script()
    script.arrive(0)
    script.run(0)
    record = script.finish(0)
    assert times_ms(record) == QUIET
    assert (record.ttft_ns, record.e2e_ns) == (66 * MS, 75 * MS)
    assert record.tpot_ns == 3 * MS
    assert (record.itl.count, record.itl.sum_ns, record.itl.max_ns) == (3, 9 * MS, 3 * MS)


def delay_router(script: Script) -> None:
    script.arrive(0, ago_ms=40)
    script.run(0)


def delay_queue(script: Script) -> None:
    script.arrive(0)
    script.wait(40)
    script.run(0)


def delay_kv_load(script: Script) -> None:
    delay_copy(script, is_handoff=False)


def delay_transfer(script: Script) -> None:
    delay_copy(script, is_handoff=True)


def delay_copy(script: Script, *, is_handoff: bool) -> None:
    script.arrive(0)
    script.admit(0)
    copy = StartCopy(
        copy_id=5, source="", names=(), block_ids=(), seq_id=SeqId(0), is_handoff=is_handoff
    )
    script.see(Cancel(SeqId(-1)), copy)
    script.wait(40)
    script.see(CopyDone(5, 0))
    script.run(0)


def delay_own_prefill(script: Script) -> None:
    script.arrive(0)
    script.admit(0)
    script.step((0, 0, PROMPT), ms=66 + 40, emits=[0])
    for i in range(3):
        script.step((0, PROMPT + i, 1), emits=[0])


def delay_others_prefill(script: Script) -> None:
    """Another prompt of 40 tokens shares the first decode step."""
    script.arrive(0, 1)
    script.admit(0)
    script.step((0, 0, PROMPT), emits=[0])
    script.step((0, PROMPT, 1), (1, 0, 40), emits=[0])
    script.step((0, PROMPT + 1, 1), emits=[0])
    script.step((0, PROMPT + 2, 1), emits=[0])


def delay_left_out(script: Script) -> None:
    """The sequence is admitted, but the budget goes to another prompt."""
    script.arrive(0, 1)
    script.admit(0)
    script.step((1, 0, 38))
    script.run(0)


def delay_preemption_wait(script: Script) -> None:
    script.arrive(0)
    script.run(0, num_decode=2)
    script.see(Cancel(SeqId(-1)), Preempted(SeqId(0), "no room", PROMPT + 2))
    script.wait(40)
    script.admit(0, num_cached=PROMPT + 2)
    script.step((0, PROMPT + 2, 1), emits=[0])


def delay_preemption_recompute(script: Script) -> None:
    """40 lost tokens are computed again, 26 are found in the cache."""
    script.arrive(0)
    script.run(0, num_decode=2)
    script.see(Cancel(SeqId(-1)), Preempted(SeqId(0), "no room", PROMPT + 2))
    script.admit(0, num_cached=26)
    script.step((0, 26, 41), emits=[0])


def delay_failed_step(script: Script) -> None:
    script.arrive(0)
    script.run(0, num_decode=2)
    lost = Preempted(SeqId(0), "step failed", PROMPT + 2)
    script.step((0, PROMPT + 2, 1), ms=40, fails=True, then=[lost])
    script.admit(0, num_cached=PROMPT + 2)
    script.step((0, PROMPT + 2, 1), emits=[0])


def delay_decode(script: Script) -> None:
    script.arrive(0)
    script.run(0, num_decode=2)
    script.step((0, PROMPT + 2, 1), ms=3 + 40, emits=[0])


def delay_decode_interference(script: Script) -> None:
    """40 others decode beside it."""
    others = [(i, PROMPT, 1) for i in range(1, 41)]
    script.arrive(*range(41))
    script.run(0, num_decode=2)
    for i, *_ in others:
        script.admit(i)
    script.step((0, PROMPT + 2, 1), *others, emits=[0])


def delay_crowded_decode(script: Script) -> None:
    """It decodes, but 38 others fill the step."""
    others = [(i, PROMPT, 1) for i in range(1, 39)]
    script.arrive(*range(39))
    script.run(0, num_decode=2)
    script.step(*others)
    script.step((0, PROMPT + 2, 1), emits=[0])


@pytest.mark.parametrize(
    ("inject", "cause"),
    [
        (delay_router, Cause.ROUTER_WAIT),
        (delay_queue, Cause.QUEUE),
        (delay_kv_load, Cause.KV_LOAD),
        (delay_transfer, Cause.TRANSFER),
        (delay_own_prefill, Cause.OWN_PREFILL),
        (delay_others_prefill, Cause.OTHERS_PREFILL),
        (delay_left_out, Cause.OTHERS_PREFILL),
        (delay_preemption_wait, Cause.PREEMPTION),
        (delay_preemption_recompute, Cause.PREEMPTION),
        (delay_failed_step, Cause.PREEMPTION),
        (delay_decode, Cause.DECODE),
        (delay_decode_interference, Cause.DECODE_INTERFERENCE),
        (delay_crowded_decode, Cause.DECODE_INTERFERENCE),
    ],
)
def test_a_delay_of_40_ms_is_found_where_it_was_injected(inject: object, cause: Cause) -> None:
    script = Script()
    inject(script)  # type: ignore[operator]
    record = script.finish(0)
    assert record.e2e_ns == 115 * MS
    found = times_ms(record)
    for other in Cause:
        expected = QUIET.get(other, 0.0) + (40.0 if other is cause else 0.0)
        assert found.get(other, 0.0) == pytest.approx(expected, rel=0.05, abs=0.05 * 40)


def test_a_slow_client_delays_the_end_and_nothing_else() -> None:
    script = Script(Slo(e2e_ms=100.0, ttft_ms=100.0))
    script.arrive(0)
    script.run(0)
    record = script.finish(0)
    assert record.good
    late = record.with_client_wait(Ns(120 * MS))
    assert times_ms(late) == {**QUIET, "client_backpressure": 120.0}
    assert late.time.total_ns == late.e2e_ns == 195 * MS
    assert late.ttft_ns == record.ttft_ns
    assert late.tpot_ns == 43 * MS
    assert not late.good
    assert [(miss.metric, miss.cause) for miss in late.misses] == [
        (Metric.E2E, Cause.CLIENT_BACKPRESSURE)
    ]


# ---- how shared time is divided


def test_a_shared_step_is_split_by_predicted_cost() -> None:
    """1 token of its own, 5 of a prompt, 4 others that decode; 12 ms predicted, 24 ms taken."""
    script = Script()
    script.arrive(*range(6))
    script.run(0, num_decode=0)
    others = [(i, PROMPT, 1) for i in range(2, 6)]
    script.step((0, PROMPT, 1), (1, 0, 5), *others, ms=24, emits=[0])
    found = times_ms(script.finish(0))
    assert found["decode"] == pytest.approx(24 * 3 / 12)
    assert found["others_prefill"] == pytest.approx(18 * 5 / 9)
    assert found["decode_interference"] == pytest.approx(18 * 4 / 9)


def test_time_in_which_nothing_ran_is_queue() -> None:
    script = Script()
    script.arrive(0)
    script.admit(0)
    script.wait(10)
    script.run(0)
    assert times_ms(script.finish(0)) == {**QUIET, "queue": 10.0}


def test_a_step_under_way_counts_for_those_it_leaves_out() -> None:
    """Cancelled in the middle of a step of others' prefill."""
    script = Script()
    script.arrive(0, 1)
    script.admit(0)
    plan = StepPlan(StepId(99), (SeqStep(SeqId(1), 0, (7,) * 30, ()),))
    script.see(Cancel(SeqId(-1)), StartStep(plan))
    script.wait(20)
    assert times_ms(script.finish(0, FinishReason.CANCELLED)) == {"others_prefill": 20.0}


def test_a_prompt_longer_than_what_was_lost_goes_on_as_prefill() -> None:
    """Preempted after 16 of 64 tokens: computing these again is preemption, the rest is its own."""
    script = Script()
    script.arrive(0)
    script.admit(0)
    script.step((0, 0, 16))
    script.see(Cancel(SeqId(-1)), Preempted(SeqId(0), "no room", 16))
    script.admit(0)
    script.step((0, 0, PROMPT), emits=[0])
    assert times_ms(script.finish(0)) == {"own_prefill": 18.0 + 50.0, "preemption": 16.0}


def test_preempted_again_before_it_regained_everything() -> None:
    script = Script()
    script.arrive(0)
    script.run(0, num_decode=0)
    script.see(Cancel(SeqId(-1)), Preempted(SeqId(0), "no room", PROMPT))
    script.admit(0)
    script.step((0, 0, 16))  # 18 ms
    script.see(Cancel(SeqId(-1)), Preempted(SeqId(0), "no room", 16))
    script.wait(10)
    script.admit(0)
    script.step((0, 0, 48))  # 50 ms
    script.step((0, 48, 16 + 1), emits=[0])  # 19 ms, of these 3 for its new token
    script.wait(7)  # nothing is lost any more
    record = script.finish(0)
    assert times_ms(record) == {
        "own_prefill": 66.0,
        "preemption": 94.0,
        "decode": 3.0,
        "queue": 7.0,
    }
    assert record.num_preemptions == 2


def test_copies_that_overlap_a_step_take_no_time_of_their_own() -> None:
    script = Script()
    script.arrive(0)
    script.admit(0)
    script.see(
        Cancel(SeqId(-1)), StartCopy(copy_id=1, source="", names=(), block_ids=(), seq_id=SeqId(0))
    )
    script.wait(5)
    script.step((0, 0, PROMPT), emits=[0])
    script.see(CopyDone(1, 0))
    script.step((0, PROMPT, 1), emits=[0])
    assert times_ms(script.finish(0)) == {"kv_load": 5.0, "own_prefill": 66.0, "decode": 3.0}


def test_a_copy_that_began_before_the_sequence_came_counts_from_there_on() -> None:
    script = Script()
    copy = StartCopy(copy_id=1, source="", names=(), block_ids=(), seq_id=SeqId(0), is_handoff=True)
    script.see(Cancel(SeqId(-1)), copy)
    script.arrive(0)
    script.wait(5)
    script.see(CopyDone(1, 0))
    script.run(0, num_decode=0)
    assert times_ms(script.finish(0)) == {"transfer": 5.0, "own_prefill": 66.0}


def test_arrival_after_the_engine_saw_it_is_taken_for_now() -> None:
    script = Script()
    script.wait(10)
    script.arrive(0, ago_ms=-30)
    record = script.finish(0, FinishReason.CANCELLED)
    assert (record.arrived_ns, record.e2e_ns) == (10 * MS, 0)


# ---- the cause of a miss


def test_each_miss_names_what_took_most_of_its_own_interval() -> None:
    script = Script(Slo(ttft_ms=100.0, itl_ms=20.0, tpot_ms=10.0, e2e_ms=150.0))
    script.arrive(0, 1)
    script.wait(90)
    script.run(0, num_decode=1)
    script.step((0, PROMPT + 1, 1), (1, 0, 40), emits=[0])
    script.step((0, PROMPT + 2, 1), emits=[0])
    record = script.finish(0)
    assert not record.good
    assert {miss.metric: miss.cause for miss in record.misses} == {
        Metric.TTFT: Cause.QUEUE,
        Metric.ITL: Cause.OTHERS_PREFILL,
        Metric.TPOT: Cause.OTHERS_PREFILL,
        Metric.E2E: Cause.QUEUE,
    }
    itl = next(miss for miss in record.misses if miss.metric is Metric.ITL)
    assert (itl.limit_ns, itl.actual_ns) == (20 * MS, 43 * MS)
    assert record.worst_gap_time is not None
    assert record.worst_gap_time.total_ns == record.itl.max_ns
    assert record.ttft_time is not None
    assert record.ttft_time.total_ns == record.ttft_ns == 156 * MS


def test_a_request_without_a_token_misses_ttft_once_it_has_waited_longer() -> None:
    script = Script(Slo(ttft_ms=100.0))
    script.arrive(0, 1)
    script.wait(50)
    early = script.finish(0, FinishReason.CANCELLED)
    script.wait(60)
    late = script.finish(1, FinishReason.CANCELLED)
    assert early.misses == ()
    assert [(m.metric, m.cause, m.actual_ns) for m in late.misses] == [
        (Metric.TTFT, Cause.QUEUE, 110 * MS)
    ]
    assert not early.good
    assert not late.good


def test_own_limits_go_before_default_ones() -> None:
    script = Script(Slo(ttft_ms=1.0, e2e_ms=1.0))
    script.arrive(0, slo=Slo(ttft_ms=1000.0))
    script.run(0)
    record = script.finish(0)
    assert record.slo == Slo(ttft_ms=1000.0, e2e_ms=1.0)
    assert [miss.metric for miss in record.misses] == [Metric.E2E]


# ---- tokens, lives


def test_tokens_of_one_emit_have_no_gap_between_them() -> None:
    script = Script()
    script.arrive(0)
    script.admit(0)
    script.step((0, 0, PROMPT))
    script.see(Cancel(SeqId(-1)), Emit(SeqId(0), (1, 2, 3)))
    script.wait(30)
    script.see(Cancel(SeqId(-1)), Emit(SeqId(0), (4, 5)))
    itl = script.finish(0).itl
    assert (itl.count, itl.sum_ns, itl.max_ns) == (4, 30 * MS, 30 * MS)
    assert itl.histogram[0] == 3
    assert sum(itl.histogram) == 4


def test_scores_without_a_token_are_no_first_token() -> None:
    script = Script()
    script.arrive(0)
    script.see(Cancel(SeqId(-1)), Emit(SeqId(0), ()))
    assert script.finish(0).first_token_ns is None


def test_a_rejected_sequence_leaves_no_record_and_no_life() -> None:
    script = Script()
    script.see(
        Arrive((spec(0, Ns(0), Slo()),)), Reject(SeqId(0), 429, "queue_full", "too many wait")
    )
    assert script.telemetry.num_live == 0
    assert script.records == {}


def test_sequences_from_before_the_first_event_are_others() -> None:
    """Telemetry attached to a running engine: strangers decode and prefill beside a known one."""
    script = Script()
    script.see(StepDone(StepResult(StepId(3), (), Ns(0))), Emit(SeqId(8), (1,)))
    script.arrive(0)
    script.run(0, num_decode=0)
    script.step((0, PROMPT, 1), (8, 500, 1), (9, 0, 5), emits=[0])
    script.see(Cancel(SeqId(8)), Finish(SeqId(8), FinishReason.CANCELLED, 1, 1, 0, 0))
    record = script.finish(0)
    assert times_ms(record) == pytest.approx(
        {"own_prefill": 66.0, "decode": 3.0, "others_prefill": 5.0, "decode_interference": 1.0}
    )
    assert script.records.keys() == {0}
