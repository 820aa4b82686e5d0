"""EngineCore: accepting, rejecting, ending; every state can be cancelled."""

import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import Arrive, CallAt, Cancel, Finish, KvChanged, StepDone, Timer
from headrace.core.base.plan import StepResult
from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.kv.names import BlockChain, root_name
from support.fake_device import VOCAB, Bench, expected_output


def test_a_sequence_from_arrival_to_end() -> None:
    bench = Bench()
    spec = bench.seq((1, 2, 3, 4, 5), max_tokens=4)
    bench.handle(Arrive((spec,)))
    bench.run()
    assert bench.output[spec.seq_id] == expected_output(spec)
    finish = bench.finished[spec.seq_id]
    assert (finish.reason, finish.num_prompt_tokens, finish.num_output_tokens) == ("length", 5, 4)
    assert bench.core.is_idle


@pytest.mark.parametrize("is_eos", [False, True])
def test_stop_tokens_end_it_and_are_part_of_the_output(is_eos: bool) -> None:
    bench = Bench()
    probe = bench.seq((1, 2, 3), max_tokens=10)
    stop = expected_output(probe)[4]
    ends = {"eos_token_ids" if is_eos else "stop_token_ids": (stop,)}
    spec = bench.seq((1, 2, 3), max_tokens=10, **ends)
    bench.handle(Arrive((spec,)))
    bench.run()
    assert bench.finished[spec.seq_id].reason == "stop"
    assert bench.finished[spec.seq_id].stop_token_id == stop
    assert bench.output[spec.seq_id][-1] == stop


def test_nothing_ends_before_min_tokens() -> None:
    bench = Bench()
    eos = tuple(range(VOCAB))
    spec = bench.seq((1,), max_tokens=9, min_tokens=3, eos_token_ids=eos, stop_token_ids=eos)
    bench.handle(Arrive((spec,)))
    bench.run()
    assert len(bench.output[spec.seq_id]) == 3
    assert bench.finished[spec.seq_id].reason == "stop"


def test_ignore_eos_goes_on() -> None:
    bench = Bench()
    eos = tuple(range(VOCAB))
    bench.handle(Arrive((bench.seq((1,), max_tokens=5, eos_token_ids=eos, ignore_eos=True),)))
    bench.run()
    assert bench.finished[SeqId(0)].reason == "length"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code", "said"),
    [
        ((), 1, "prompt_empty", "no tokens"),
        ((VOCAB,), 1, "token_out_of_range", f"{VOCAB} is not below {VOCAB}"),
        ((-1,), 1, "token_out_of_range", "-1"),
        (
            (1,) * 198,
            3,
            "context_length_exceeded",
            "198 tokens and max_tokens of 3 exceed the model's 200",
        ),
        ((1,) * 60, 60, "kv_pool_too_small", "need 30 KV blocks, the pool has 16"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    prompt: tuple[int, ...], max_tokens: int, code: str, said: str
) -> None:
    bench = Bench(num_blocks=16)
    spec = bench.seq((1,))
    bad = type(spec)(
        seq_id=SeqId(9),
        request_id="bad",
        prompt_tokens=prompt,
        params=type(spec.params)(max_tokens=max_tokens),
    )
    bench.handle(Arrive((bad, spec)))
    reject = bench.rejected[SeqId(9)]
    assert (reject.status_hint, reject.code) == (400, code)
    assert said in reject.message
    bench.run()
    assert bench.finished.keys() == {spec.seq_id}


def test_a_full_queue_refuses_with_the_time_to_come_back() -> None:
    bench = Bench(max_waiting_seqs=2, max_running_seqs=1)
    bench.handle(Arrive((bench.seq((1,), max_tokens=3),)))
    bench.handle(Arrive(tuple(bench.seq((2,), max_tokens=1) for _ in range(3))))
    assert [reject.code for reject in bench.rejected.values()] == ["queue_full"]
    reject = bench.rejected[SeqId(3)]
    assert reject.status_hint == 429
    assert reject.retry_after_s is not None
    bench.run()
    assert bench.finished.keys() == {0, 1, 2}


def test_early_rejection_says_the_predicted_ttft() -> None:
    bench = Bench(early_reject=True, step_tokens=10, max_running_seqs=1)
    # 15 steps of 1100 ns are due before it: 16.5 µs and its own.
    bench.handle(Arrive((bench.seq((1,) * 150, max_tokens=1),)))
    bench.handle(Arrive((bench.seq((2,) * 10, max_tokens=1, slo=Slo(ttft_ms=0.010)),)))
    reject = bench.rejected[SeqId(1)]
    assert (reject.status_hint, reject.code) == (503, "ttft_unattainable")
    assert reject.retry_after_s is not None
    bench.handle(Arrive((bench.seq((2,) * 10, max_tokens=1, slo=Slo(ttft_ms=1)),)))
    bench.run()
    assert bench.finished.keys() == {0, 2}


def test_cancel_in_every_state_and_again() -> None:
    bench = Bench(max_running_seqs=1, step_tokens=4)
    bench.handle(Arrive((bench.seq((1,) * 10, max_tokens=9), bench.seq((2,) * 10, max_tokens=9))))
    # Waiting: at once.
    effects = bench.handle(Cancel(SeqId(1)))
    assert [effect.reason for effect in effects if isinstance(effect, Finish)] == ["cancelled"]
    # In the running step: when the step is done, without another token.
    assert not [effect for effect in bench.handle(Cancel(SeqId(0))) if isinstance(effect, Finish)]
    bench.handle(Cancel(SeqId(0)))
    bench.step()
    assert bench.finished[SeqId(0)].reason == "cancelled"
    assert bench.core.is_idle
    # After the end, and never heard of.
    assert bench.handle(Cancel(SeqId(0))) == []
    assert bench.handle(Cancel(SeqId(77))) == []
    assert bench.core.stats().num_pinned_blocks == 0


def test_the_reader_of_the_text_may_say_that_it_is_complete() -> None:
    bench = Bench()
    bench.handle(Arrive((bench.seq((1,), max_tokens=9),)))
    bench.step()
    bench.handle(Cancel(SeqId(0), FinishReason.STOP))
    bench.handle(Cancel(SeqId(0)))  # too late to change the reason
    bench.step()
    assert bench.finished[SeqId(0)].reason == "stop"


def test_a_deadline_ends_a_waiting_sequence_without_any_prefill() -> None:
    bench = Bench(max_running_seqs=1)
    bench.handle(Arrive((bench.seq((1,), max_tokens=50),)))
    late = bench.seq((2,) * 8, max_tokens=5, deadline_ns=Ns(500))
    calls = [e for e in bench.handle(Arrive((late,))) if isinstance(e, CallAt)]
    assert [(call.at_ns, call.timer_id) for call in calls] == [(500, late.seq_id)]
    bench.handle(Timer(late.seq_id), after_ns=600)
    assert bench.finished[late.seq_id].reason == "deadline"
    assert bench.finished[late.seq_id].num_output_tokens == 0
    assert late.seq_id not in {seq.seq_id for plan in bench.plans for seq in plan.seqs}


def test_a_deadline_that_has_passed_is_the_end_before_any_step() -> None:
    bench = Bench()
    late = bench.seq((2,) * 8, max_tokens=5, deadline_ns=Ns(10))
    bench.handle(Arrive((late,)))
    assert bench.finished[late.seq_id].reason == "deadline"
    assert not bench.plans
    assert bench.core.is_idle


def test_a_failed_step_is_computed_again() -> None:
    bench = Bench()
    bench.handle(Arrive((bench.seq((1, 2, 3), max_tokens=5),)))
    bench.step()
    bench.fail_step()
    assert bench.preempted
    bench.run()
    bench.assert_outputs()
    stats = bench.core.stats()
    assert (stats.num_steps, stats.num_failed_steps) == (5, 1)
    # The prompt and four of the output; after the first step all of it again.
    assert stats.num_computed_tokens == 3 + 4 + 3


def test_a_step_that_always_fails_ends_its_sequences_with_the_error() -> None:
    bench = Bench()
    bench.handle(Arrive((bench.seq((1, 2, 3), max_tokens=5),)))
    for _ in range(3):
        bench.fail_step()
    finish = bench.finished[SeqId(0)]
    assert (finish.reason, finish.error) == ("error", "device on fire")
    assert bench.core.is_idle


def test_failures_far_apart_end_nothing() -> None:
    bench = Bench()
    bench.handle(Arrive((bench.seq((1, 2, 3), max_tokens=20),)))
    for _ in range(5):
        bench.step()
        bench.fail_step()
        bench.fail_step()
    bench.run()
    assert bench.finished[SeqId(0)].reason == "length"
    bench.assert_outputs()


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_what_is_wrong_with_one_sequence_ends_no_other(overlap: str, num_steps: int) -> None:
    bench = Bench(overlap=overlap, step_tokens=8)
    seqs = [bench.seq((i, *range(1, 4)), max_tokens=8) for i in range(3)]
    for spec in seqs:
        bench.handle(Arrive((spec,)))
    for _ in range(num_steps):
        bench.step()
    bench.device.spoilt.add(seqs[1].seq_id)
    bench.run()
    assert [bench.finished[spec.seq_id].reason for spec in seqs] == ["length", "error", "length"]
    assert bench.finished[seqs[1].seq_id].error == "not a number"
    assert not bench.preempted
    bench.assert_outputs()
    bench.core.check()
    assert bench.core.stats().num_failed_steps == 0


def test_a_sequence_that_is_cancelled_and_spoilt_ends_once() -> None:
    bench = Bench()
    bench.handle(Arrive((bench.seq((1, 2, 3), max_tokens=5),)))
    bench.device.spoilt.add(SeqId(0))
    bench.handle(Cancel(SeqId(0)))
    bench.run()
    assert bench.finished[SeqId(0)].reason == "cancelled"


def test_prompt_scores_come_once_though_the_prompt_is_recomputed() -> None:
    bench = Bench(step_tokens=4)
    spec = bench.seq(tuple(range(14)), max_tokens=2, prompt_logprobs=0)
    bench.handle(Arrive((spec,)))
    bench.step()
    bench.step()
    bench.fail_step()
    bench.run()
    assert [score.token_id for score in bench.prompt_scores[spec.seq_id]] == list(range(1, 14))


def test_kv_changes_are_told() -> None:
    bench = Bench(num_blocks=4)
    bench.handle(Arrive((bench.seq(tuple(range(9)), max_tokens=1),)))
    told = [change for e in bench.step() if isinstance(e, KvChanged) for change in e.changes]
    assert [len(change.names) for change in told] == [2]


@pytest.mark.parametrize("fields", [{}, {"salt": "alice"}, {"salt": "bob"}, {"adapter": "a"}])
def test_blocks_are_named_by_all_that_decides_their_content(fields: dict[str, str]) -> None:
    bench = Bench()
    prompt = tuple(range(9))
    bench.handle(Arrive((bench.seq(prompt, max_tokens=1),)))
    bench.run()
    spec = bench.seq(prompt, max_tokens=1, **fields)
    bench.handle(Arrive((spec,)))
    changes = [change for e in bench.step() if isinstance(e, KvChanged) for change in e.changes]
    chain = BlockChain(root_name("fake", "bf16", 4, spec.adapter, spec.salt), 4)
    chain.extend(prompt)
    # Without fields it is the first sequence again, and finds everything.
    told = [name for change in changes for name in change.names]
    assert told == (chain.names if fields else [])
    assert bench.core.stats().num_hit_tokens == (0 if fields else 8)


def test_our_own_bugs_are_loud() -> None:
    bench = Bench()
    spec = bench.seq((1,), max_tokens=9)
    bench.handle(Arrive((spec,)))
    with pytest.raises(InvariantError, match="twice"):
        bench.core.handle(bench.now, Arrive((spec,)))
    with pytest.raises(InvariantError, match="does not run"):
        bench.core.handle(bench.now, StepDone(StepResult(StepId(99), (), Ns(1))))
    with pytest.raises(InvariantError, match="time went back"):
        bench.core.handle(Ns(bench.now - 1), Cancel(SeqId(0)))
