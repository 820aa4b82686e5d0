"""What the scheduler puts into a step, case by case, on a device that knows the right tokens."""

import pytest

from headrace.core.base.events import Arrive, Cancel
from headrace.core.base.request import AGING_NS, Slo
from headrace.core.base.types import Ns, SeqId
from headrace.core.scheduler.burst import BURST_NS
from headrace.core.scheduler.lanes import QUANTUM_TOKENS
from support.fake_device import Bench, shares


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    bench = Bench(step_tokens=8)
    bench.handle(Arrive((bench.seq((1, 2, 3), max_tokens=8),)))
    assert shares(bench.plan) == {0: 3}
    bench.handle(Arrive((bench.seq((7,) * 20, max_tokens=2),)))
    bench.step()
    assert shares(bench.plan) == {0: 1, 1: 7}
    bench.step()
    assert shares(bench.plan) == {0: 1, 1: 7}
    bench.step()
    assert shares(bench.plan) == {0: 1, 1: 6}
    assert bench.plan is not None
    assert bench.plan.seqs[1].sample is not None  # only now it has logits to choose from
    bench.run()
    bench.assert_outputs()


def test_one_token_each_for_those_that_decode_before_an_older_prompt() -> None:
    bench = Bench(step_tokens=8, chunk_tokens=7)
    bench.handle(Arrive((bench.seq((1,) * 40, max_tokens=1), bench.seq((2,), max_tokens=9))))
    bench.step()
    assert list(shares(bench.plan).items()) == [(1, 1), (0, 7)]


def test_chunk_tokens_caps_one_sequence_not_the_step() -> None:
    bench = Bench(step_tokens=16, chunk_tokens=4)
    bench.handle(Arrive((bench.seq((1,) * 10), bench.seq((2,) * 10), bench.seq((3,) * 3))))
    assert shares(bench.plan) == {0: 4, 1: 4, 2: 3}


def test_nobody_is_admitted_to_a_step_that_is_full_of_decoding() -> None:
    bench = Bench(step_tokens=2)
    bench.handle(Arrive(tuple(bench.seq((i,), max_tokens=3) for i in range(5))))
    bench.run()
    assert [hit.seq_id for hit in bench.admitted] == [0, 1, 2, 3, 4]
    assert all(plan.num_tokens <= 2 for plan in bench.plans)
    bench.assert_outputs()


@pytest.mark.parametrize("num_twins", [2, 5])
def test_twins_that_arrive_together_are_computed_once(num_twins: int) -> None:
    bench = Bench(step_tokens=64)
    prompt = tuple(range(30))
    bench.handle(Arrive(tuple(bench.seq(prompt, max_tokens=2, seed=i) for i in range(num_twins))))
    assert shares(bench.plan) == {0: 30}
    bench.step()
    # Seven full blocks are shared; a full hit would leave no logits, so the tail is computed.
    assert shares(bench.plan) == {0: 1} | dict.fromkeys(range(1, num_twins), 2)
    assert [hit.num_cached_tokens for hit in bench.admitted] == [0] + [28] * (num_twins - 1)
    bench.run()
    bench.assert_outputs()


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_twin_of_a_sequence_that_is_lost_computes_for_itself(is_cancelled: bool) -> None:
    bench = Bench(step_tokens=8)
    prompt = tuple(range(30))
    bench.handle(Arrive((bench.seq(prompt, max_tokens=2), bench.seq(prompt, max_tokens=2))))
    bench.step()
    if is_cancelled:
        bench.handle(Cancel(SeqId(0)))
    else:
        bench.fail_step()
    bench.run()
    assert len(bench.finished) == 2
    bench.assert_outputs()


def test_twins_do_not_wait_for_what_will_not_be_cached() -> None:
    bench = Bench(step_tokens=64, prefix_cache=False)
    bench.handle(Arrive((bench.seq((1,) * 20), bench.seq((1,) * 20))))
    assert shares(bench.plan) == {0: 20, 1: 20}


def test_a_head_that_does_not_fit_is_overtaken_until_it_is_old() -> None:
    bench = Bench(num_blocks=8, admission="no_evict", skip_ahead_age_ms=0.001)  # 1 µs
    bench.handle(Arrive((bench.seq((1,) * 8, max_tokens=8),)))  # promised 4 of 8 blocks
    bench.handle(Arrive((bench.seq((2,) * 20, max_tokens=4), bench.seq((3,) * 4, max_tokens=4))))
    bench.step()
    assert shares(bench.plan) == {0: 1, 2: 4}  # sequence 1 needs 6 blocks
    bench.handle(Arrive((bench.seq((4,) * 4, max_tokens=4),)), after_ns=2000)
    for _ in range(4):
        bench.step()
        assert 3 not in shares(bench.plan)  # the head is old: nobody passes it any more
    bench.run()
    assert [hit.seq_id for hit in bench.admitted] == [0, 2, 1, 3]
    bench.assert_outputs()


def test_the_skip_ahead_window_is_a_limit() -> None:
    bench = Bench(num_blocks=8, admission="no_evict", skip_ahead_window=1)
    bench.handle(Arrive((bench.seq((1,) * 8, max_tokens=8),)))
    big = [bench.seq((i,) * 20, max_tokens=4) for i in (2, 3)]
    bench.handle(Arrive((*big, bench.seq((4,) * 4, max_tokens=4))))
    bench.step()
    assert shares(bench.plan) == {0: 1}


def test_no_evict_never_preempts() -> None:
    bench = Bench(num_blocks=10, admission="no_evict")
    bench.handle(Arrive(tuple(bench.seq((i,) * 5, max_tokens=15) for i in range(12))))
    bench.run()
    assert not bench.preempted
    bench.assert_outputs()


def test_optimistic_admission_preempts_and_recomputes_the_same_tokens() -> None:
    bench = Bench(num_blocks=10, admission="optimistic")
    bench.handle(Arrive(tuple(bench.seq((i,) * 5, max_tokens=15, seed=i) for i in range(12))))
    bench.run()
    assert bench.preempted
    assert max(finish.num_preemptions for finish in bench.finished.values()) <= 2
    bench.assert_outputs()


def test_fifty_sequences_in_a_pool_for_three() -> None:
    bench = Bench(num_blocks=15, admission="predicted", predicted_output_tokens=4)
    bench.handle(Arrive(tuple(bench.seq((i, i, i, i), max_tokens=16, seed=i) for i in range(50))))
    bench.run()
    bench.assert_outputs()
    assert len(bench.finished) == 50
    stats = bench.core.stats()
    assert stats.num_recomputed_tokens < 0.5 * 50 * 20  # the recompute tax
    assert max(finish.num_preemptions for finish in bench.finished.values()) <= 2


def test_priority_goes_first_and_is_the_last_to_be_preempted() -> None:
    bench = Bench(num_blocks=10, order="priority", admission="optimistic", max_running_seqs=3)
    specs = [bench.seq((i,) * 5, max_tokens=15, priority=5 - i) for i in range(6)]
    bench.handle(Arrive(tuple(specs)))
    assert sorted(shares(bench.plan)) == [3, 4, 5]
    bench.run()
    assert 5 not in {preempted.seq_id for preempted in bench.preempted}
    bench.assert_outputs()


def test_waiting_makes_up_for_a_worse_priority() -> None:
    bench = Bench(order="priority", max_running_seqs=1)
    arrivals = {
        "first": (0, 0),
        "low": (1, 0),
        "soon": (0, AGING_NS - 1),
        "late": (0, AGING_NS + 1),
    }
    seqs = {
        name: bench.seq((1,), max_tokens=1, priority=priority, arrived_ns=Ns(arrived_ns))
        for name, (priority, arrived_ns) in arrivals.items()
    }
    bench.handle(Arrive(tuple(seqs.values())))
    bench.run()
    served = [admitted.seq_id for admitted in bench.admitted]
    assert served == [seqs[name].seq_id for name in ("first", "soon", "low", "late")]


def test_nobody_loses_its_blocks_to_a_lower_priority() -> None:
    for seed in range(8):
        bench = Bench(num_blocks=12, order="priority", admission="optimistic", max_preemptions=50)
        specs = [
            bench.seq((i + seed,) * 5, max_tokens=15, priority=(i + seed) % 3) for i in range(9)
        ]
        for spec in specs:
            bench.handle(Arrive((spec,)))
            if bench.plan is not None:
                bench.step()
        bench.run()
        bench.assert_outputs()
        assert bench.preempted
        for preempted in bench.preempted:
            grower = int(preempted.reason.split()[4])
            victim = bench.specs[preempted.seq_id]
            assert victim.priority >= bench.specs[SeqId(grower)].priority


def test_a_failed_step_is_no_mark_against_its_sequences() -> None:
    bench = Bench(num_blocks=20, admission="optimistic", max_preemptions=2)
    bench.handle(Arrive(tuple(bench.seq((i,) * 4, max_tokens=40, seed=i) for i in range(4))))
    bench.step()
    bench.fail_step()
    bench.step()
    bench.fail_step()
    # Were they protected now, each would be promised 11 of the 20 blocks.
    assert bench.plan is not None
    assert len(bench.plan.seqs) == 4
    bench.run()
    bench.assert_outputs()


def test_longest_prefix_uses_what_is_cached_before_what_is_not() -> None:
    bench = Bench(order="longest_prefix", max_running_seqs=1)
    bench.handle(Arrive((bench.seq(tuple(range(12)), max_tokens=1),)))
    bench.run()
    cold, warm = bench.seq((9,) * 12, max_tokens=1), bench.seq(tuple(range(14)), max_tokens=1)
    bench.handle(Arrive((cold, warm)))
    assert sorted(shares(bench.plan)) == [warm.seq_id]


def test_slo_slack_serves_the_most_urgent_and_not_the_lost() -> None:
    bench = Bench(order="slo_slack", max_running_seqs=1)
    bench.handle(Arrive((bench.seq((1,), max_tokens=3),)))
    lost = bench.seq((2,), max_tokens=1, slo=Slo(ttft_ms=0.000001))
    easy = bench.seq((3,), max_tokens=1, slo=Slo(ttft_ms=1000))
    urgent = bench.seq((4,), max_tokens=1, slo=Slo(ttft_ms=10))
    bench.handle(Arrive((lost, easy, urgent)))
    bench.run()
    assert [hit.seq_id for hit in bench.admitted] == [0, urgent.seq_id, easy.seq_id, lost.seq_id]


def test_the_itl_budget_is_the_largest_that_keeps_the_target() -> None:
    # A step costs 1000 ns + 10 ns a token: 1500 ns allow 50 tokens.
    bench = Bench(itl_target_ms=0.0015, itl_margin=0.0, step_tokens=400)
    bench.handle(Arrive((bench.seq((1,), max_tokens=50),)))
    bench.step()
    bench.handle(Arrive((bench.seq((2,) * 120, max_tokens=1),)), after_ns=BURST_NS)
    bench.step()
    assert shares(bench.plan) == {0: 1, 1: 49}
    bench.run()
    # A request that states a tighter limit has its way; prefill never stops altogether.
    bench.handle(Arrive((bench.seq((3,), max_tokens=50, slo=Slo(itl_ms=0.00102)),)))
    bench.step()
    bench.handle(Arrive((bench.seq((4,) * 90, max_tokens=1),)), after_ns=BURST_NS)
    bench.step()
    assert shares(bench.plan) == {2: 1, 3: 8}


def test_a_short_prompt_runs_beside_a_long_one() -> None:
    bench = Bench(short_prompt_tokens=10, step_tokens=8, short_prompt_share=0.75)
    bench.handle(Arrive((bench.seq((1,) * 100, max_tokens=2),)))
    bench.handle(Arrive((bench.seq((2,) * 10, max_tokens=2),)))
    bench.step()
    assert shares(bench.plan) == {0: 2, 1: 6}
    bench.step()
    assert shares(bench.plan) == {0: 4, 1: 4}  # what one lane leaves is the other's
    bench.step()
    assert shares(bench.plan) == {1: 1, 0: 7}
    bench.run()
    bench.assert_outputs()


def test_one_lane_alone_has_the_whole_step() -> None:
    bench = Bench(short_prompt_tokens=10, step_tokens=32)
    bench.handle(Arrive((bench.seq((1,) * 100, max_tokens=1),)))
    assert shares(bench.plan) == {0: 32}
    bench = Bench(short_prompt_tokens=100, step_tokens=32)
    bench.handle(Arrive((bench.seq((1,) * 100, max_tokens=1),)))
    assert shares(bench.plan) == {0: 32}


def test_both_lanes_advance_however_small_a_step_is() -> None:
    bench = Bench(short_prompt_tokens=4, step_tokens=1, max_model_len=400, num_blocks=200)
    bench.handle(Arrive((bench.seq((1,) * 20, max_tokens=1),)))
    bench.handle(Arrive(tuple(bench.seq((2 + i,) * 4, max_tokens=1) for i in range(9))))
    # With one token a step nobody may run beside another, or its turn to decode might not come.
    bench.run()
    assert len(bench.finished) == 10
    bench = Bench(short_prompt_tokens=4, step_tokens=2, max_model_len=400, num_blocks=200)
    bench.handle(Arrive((bench.seq((1,) * 20, max_tokens=1),)))
    bench.handle(Arrive(tuple(bench.seq((2 + i,) * 4, max_tokens=1) for i in range(50))))
    num_long = []
    for _ in range(24):
        num_long.append(shares(bench.plan).get(0, 0))
        bench.step()
    assert sum(num_long) >= 2 + 22 * 0.25 * 2
    bench.run()
    bench.assert_outputs()


def test_long_prompts_take_turns_and_others_wait() -> None:
    bench = Bench(
        short_prompt_tokens=10,
        max_long_prefills=2,
        step_tokens=256,
        max_model_len=2000,
        num_blocks=2000,
        prefix_cache=False,
    )
    prompts = [bench.seq((i,) * 600, max_tokens=1) for i in range(3)]
    bench.handle(Arrive(tuple(prompts)))
    bench.step()
    done = [0, 0]
    for _ in range(2):
        assert shares(bench.plan).keys() == {0, 1}
        done = [num + shares(bench.plan)[i] for i, num in enumerate(done)]
        assert abs(done[0] - done[1]) <= 2 * QUANTUM_TOKENS
        bench.step()
    bench.run()
    bench.assert_outputs()
    assert [hit.seq_id for hit in bench.admitted] == [0, 1, 2]
    assert bench.finished.keys() == {0, 1, 2}


def test_a_short_prompt_overtakes_any_number_of_long_ones_that_wait() -> None:
    bench = Bench(
        short_prompt_tokens=10,
        max_long_prefills=1,
        skip_ahead_window=2,
        step_tokens=16,
        num_blocks=2000,
        prefix_cache=False,
    )
    bench.handle(Arrive(tuple(bench.seq((i,) * 100, max_tokens=1) for i in range(9))))
    bench.handle(Arrive((bench.seq((9,) * 8, max_tokens=1),)))
    bench.step()
    assert shares(bench.plan) == {0: 8, 9: 8}
    bench.run()
    bench.assert_outputs()


def test_what_is_cached_does_not_make_a_prompt_long() -> None:
    bench = Bench(short_prompt_tokens=10, step_tokens=16, max_model_len=400, num_blocks=200)
    shared = tuple(range(40))
    bench.handle(Arrive((bench.seq(shared, max_tokens=1),)))
    bench.run()
    bench.handle(Arrive((bench.seq((1,) * 100, max_tokens=1),)))
    bench.handle(Arrive((bench.seq((*shared, 7, 7, 7), max_tokens=1),)))
    bench.step()
    assert shares(bench.plan) == {1: 13, 2: 3}


def test_a_prompt_that_needs_room_takes_it_in_any_lane() -> None:
    bench = Bench(num_blocks=16, short_prompt_tokens=6, step_tokens=16, admission="optimistic")
    bench.handle(
        Arrive(tuple(bench.seq((i,) * (4 + 9 * (i % 2)), max_tokens=30, seed=i) for i in range(9)))
    )
    bench.run()
    assert bench.preempted
    bench.assert_outputs()


def test_the_itl_budget_never_exceeds_what_a_step_may_hold() -> None:
    bench = Bench(step_tokens=4, budget="itl", itl_target_ms=100.0)
    bench.handle(Arrive(tuple(bench.seq((i,), max_tokens=9) for i in range(12))))
    bench.run()
    assert max(plan.num_tokens for plan in bench.plans) == 4
    bench.assert_outputs()


def test_min_tokens_bans_what_would_end_the_text() -> None:
    bench = Bench()
    bench.handle(
        Arrive(
            (bench.seq((1,), max_tokens=3, min_tokens=1, stop_token_ids=(5,), eos_token_ids=(6,)),)
        )
    )
    assert bench.plan is not None
    sample = bench.plan.seqs[0].sample
    assert sample is not None
    assert set(sample.banned) == {5, 6}
    bench.step()
    assert bench.plan is not None
    sample = bench.plan.seqs[0].sample
    assert sample is not None
    assert sample.banned == ()


def test_only_penalties_carry_history() -> None:
    bench = Bench()
    plain, penal = (
        bench.seq((1, 2), max_tokens=3),
        bench.seq((3,), max_tokens=3, presence_penalty=1.0),
    )
    bench.handle(Arrive((plain, penal)))
    bench.step()
    assert bench.plan is not None
    first, second = (seq.sample for seq in bench.plan.seqs)
    assert first is not None
    assert second is not None
    assert (first.prompt_tokens, first.output_tokens) == ((), ())
    assert (second.prompt_tokens, second.output_tokens) == ((3,), bench.output[penal.seq_id])
