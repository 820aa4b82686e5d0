"""KV of other workers: what arrives is used, what does not is computed, and nothing is held longer
than it should be.
"""

import pytest

from headrace.core.base.events import Arrive, Cancel, EndLease
from headrace.core.base.request import FinishReason
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from support.fake_device import Bench, expected_output

PROMPT = tuple(range(18))  # four full blocks of four tokens, and two more
SOURCE = "elsewhere"


def loading(**settings: object) -> Bench:
    """A sequence waits for its KV."""
    bench = Bench(**settings)  # type: ignore[arg-type]
    bench.handle(Arrive((bench.seq(PROMPT, max_tokens=3, kv_source=SOURCE),)))
    return bench


def computed(bench: Bench, seq_id: int) -> int:
    return sum(len(s.tokens) for plan in bench.plans for s in plan.seqs if s.seq_id == seq_id)


@pytest.mark.parametrize("num_blocks", range(5))
def test_what_has_come_is_not_computed(num_blocks: int) -> None:
    bench = loading()
    (copy,) = bench.copies
    assert (copy.source, len(copy.names), copy.seq_id, copy.is_handoff) == (SOURCE, 4, 0, True)
    assert bench.plan is None
    assert bench.core.stats().num_waiting == 1
    bench.end_copy(num_blocks, seq_id=0)
    assert not bench.copies  # what did not come is not asked for again
    bench.run()
    bench.assert_outputs()
    assert bench.finished[SeqId(0)].num_cached_tokens == 4 * num_blocks
    assert computed(bench, 0) == len(PROMPT) - 4 * num_blocks + 2
    assert bench.core.stats().num_pinned_blocks == 0
    assert bench.core.stats().num_failed_loads == (num_blocks < 4)


@pytest.mark.parametrize("promise", [{"max_preemptions": 0}, {"admission": "no_evict"}], ids=str)
def test_nothing_is_copied_into_what_others_were_promised(promise: dict[str, object]) -> None:
    bench = Bench(num_blocks=8, **promise)  # type: ignore[arg-type]
    bench.handle(Arrive((bench.seq((1,) * 4, max_tokens=20),)))  # six blocks, one by one
    bench.step()
    bench.handle(Arrive((bench.seq(PROMPT, max_tokens=3, kv_source=SOURCE),)))
    assert not bench.copies
    bench.run()
    bench.assert_outputs()
    assert not bench.preempted


@pytest.mark.parametrize("num_at_source", [1, 3, 4, 9])
def test_no_more_is_asked_for_than_its_source_has(num_at_source: int) -> None:
    """So that a copy which brings all of that is none that has failed."""
    bench = Bench()
    spec = bench.seq(PROMPT, max_tokens=3, kv_source=SOURCE, num_source_blocks=num_at_source)
    bench.handle(Arrive((spec,)))
    (copy,) = bench.copies
    assert len(copy.names) == min(num_at_source, 4)
    bench.end_copy(len(copy.names), seq_id=0)
    bench.run()
    bench.assert_outputs()
    assert bench.finished[SeqId(0)].num_cached_tokens == 4 * min(num_at_source, 4)
    assert bench.core.stats().num_failed_loads == 0


def test_nothing_is_asked_for_where_its_source_has_no_more_than_is_here() -> None:
    bench = Bench()
    bench.handle(Arrive((bench.seq(PROMPT[:9], max_tokens=1),)))
    bench.run()
    spec = bench.seq(PROMPT, max_tokens=3, kv_source=SOURCE, num_source_blocks=2)
    bench.handle(Arrive((spec,)))
    assert not bench.copies
    bench.run()
    bench.assert_outputs()


def test_only_what_is_missing_is_asked_for() -> None:
    bench = Bench()
    bench.handle(Arrive((bench.seq(PROMPT[:9], max_tokens=1),)))
    bench.run()
    bench.handle(Arrive((bench.seq(PROMPT, max_tokens=3, kv_source=SOURCE),)))
    assert len(bench.copies[0].names) == 2
    bench.end_copy(2, seq_id=1)
    bench.run()
    bench.assert_outputs()
    # All of it is known by now.
    bench.handle(Arrive((bench.seq(PROMPT, max_tokens=3, kv_source=SOURCE),)))
    assert not bench.copies
    bench.run()
    bench.assert_outputs()


def test_a_sequence_that_goes_on_brings_its_output_and_copies_the_rest() -> None:
    bench = Bench()
    whole = bench.seq(PROMPT, max_tokens=9)
    output = expected_output(whole)
    spec = bench.seq(PROMPT, max_tokens=9, kv_source=SOURCE, output_tokens=output[:3])
    bench.handle(Arrive((spec,)))
    assert len(bench.copies[0].names) == 5  # 18 + 3 tokens, of which the last is computed
    bench.end_copy(5, seq_id=1)
    bench.run()
    assert bench.output[SeqId(1)] == output[3:]
    assert computed(bench, 1) == 1 + 5


def test_nobody_waits_longer_than_allowed_and_late_blocks_are_kept() -> None:
    bench = loading()
    bench.ring()
    assert bench.now >= NS_PER_S
    assert bench.plan is not None
    bench.run_steps_only()
    bench.assert_outputs()
    assert computed(bench, 0) == len(PROMPT) + 2
    assert bench.core.stats().num_lent_blocks == 4
    bench.end_copy(2, seq_id=0)
    assert bench.core.stats().num_pinned_blocks == 0
    assert bench.core.stats().num_failed_loads == 1  # late, and not whole


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.STOP])
def test_a_sequence_may_end_while_its_kv_is_on_the_way(reason: FinishReason) -> None:
    bench = loading()
    bench.handle(Cancel(SeqId(0), reason))
    assert bench.finished[SeqId(0)].reason is reason
    assert not bench.core.is_idle  # whoever copies still writes
    assert bench.core.stats().num_pinned_blocks == 4
    bench.ring()
    bench.end_copy(1, seq_id=0)
    assert bench.core.is_idle
    assert bench.core.stats().num_pinned_blocks == 0


def test_a_deadline_ends_the_waiting_too() -> None:
    bench = Bench()
    spec = bench.seq(PROMPT, kv_source=SOURCE, deadline_ns=Ns(500))
    bench.handle(Arrive((spec,)))
    bench.ring()
    assert bench.finished[SeqId(0)].reason is FinishReason.DEADLINE
    bench.end_copy(0, seq_id=0)


@pytest.mark.parametrize("settings", [{"num_blocks": 6}, {"prefix_cache": False}])
def test_without_room_or_a_cache_all_is_computed(settings: dict[str, object]) -> None:
    bench = Bench(**settings)  # type: ignore[arg-type]
    bench.handle(Arrive((bench.seq(tuple(range(30, 42)), max_tokens=2),)))
    bench.handle(Arrive((bench.seq(PROMPT, max_tokens=3, kv_source=SOURCE),)))
    assert not bench.copies
    bench.run()
    bench.assert_outputs()


def lent(**settings: object) -> Bench:
    bench = Bench(**settings)  # type: ignore[arg-type]
    bench.handle(Arrive((bench.seq(PROMPT, max_tokens=1, is_leased=True),)))
    bench.run()
    return bench


def test_blocks_are_held_until_the_lease_is_ended() -> None:
    bench = lent()
    assert bench.core.stats().num_lent_blocks == 4
    assert bench.core.is_idle
    bench.handle(EndLease(SeqId(0)))
    bench.handle(EndLease(SeqId(0)))
    bench.handle(EndLease(SeqId(7)))
    stats = bench.core.stats()
    assert (stats.num_lent_blocks, stats.num_pinned_blocks, stats.num_cached_blocks) == (0, 0, 4)
    bench.ring()  # it has nothing left to do


def test_or_until_its_time_is_over() -> None:
    bench = lent()
    before = bench.now
    bench.ring()
    assert bench.now - before >= 9 * NS_PER_S
    assert bench.core.stats().num_lent_blocks == 0


def test_what_is_lent_is_not_evicted() -> None:
    bench = lent(num_blocks=8)
    spec = bench.seq(tuple(range(30, 42)), max_tokens=8)  # five blocks
    bench.handle(Arrive((spec,)))
    bench.run_steps_only()
    assert spec.seq_id not in bench.finished
    bench.handle(EndLease(SeqId(0)))
    bench.run()
    bench.assert_outputs()


def test_an_answer_that_ends_by_itself_lends_nothing() -> None:
    bench = Bench()
    token = expected_output(bench.seq(PROMPT, max_tokens=1))[0]
    spec = bench.seq(PROMPT, max_tokens=1, is_leased=True, eos_token_ids=(token,))
    bench.handle(Arrive((spec,)))
    bench.run()
    assert bench.finished[spec.seq_id].reason is FinishReason.STOP
    assert bench.core.stats().num_lent_blocks == 0


def test_no_copy_begins_before_the_steps_that_may_use_its_blocks_are_done() -> None:
    """A step that runs may still read a block that was given up since, to begin another with it."""
    bench = Bench(num_blocks=8)
    bench.handle(Arrive((bench.seq(PROMPT[:12], max_tokens=1),)))  # three blocks, cached
    bench.run()
    bench.handle(Arrive((bench.seq((*PROMPT[:10], 40), max_tokens=1),)))
    assert bench.plan is not None
    (tail,) = bench.plan.copies
    bench.handle(Arrive((bench.seq(tuple(range(20, 42)), max_tokens=3, kv_source=SOURCE),)))
    assert not bench.copies
    bench.step()
    assert tail.src in bench.copies[0].block_ids  # else this test would show nothing
    bench.end_copy(5, seq_id=2)
    bench.run()
    bench.assert_outputs()


@pytest.mark.parametrize("fails", [False, True])
def test_nor_before_one_that_was_planned_ahead(fails: bool) -> None:
    bench = Bench(overlap="on")
    bench.handle(Arrive((bench.seq(PROMPT[:6], max_tokens=9),)))
    bench.step()
    assert len(bench.running) == 2
    bench.handle(Arrive((bench.seq(PROMPT, max_tokens=3, kv_source=SOURCE),)))
    (bench.fail_step if fails else bench.step)()
    assert not bench.copies
    bench.step()
    bench.end_copy(len(bench.copies[0].names), seq_id=1)
    bench.run()
    bench.assert_outputs()


@pytest.mark.parametrize("num_blocks", [0, 2, 4])
def test_who_lacks_what_is_on_its_way_waits_too(num_blocks: int) -> None:
    bench = loading()
    bench.handle(Arrive((bench.seq((*PROMPT[:17], 40), max_tokens=2),)))
    bench.handle(Arrive((bench.seq((*PROMPT[:10], 40), max_tokens=2, kv_source=SOURCE),)))
    assert len(bench.copies) == 1
    assert bench.plan is None
    bench.handle(Cancel(SeqId(0)))
    bench.end_copy(num_blocks, seq_id=0)
    bench.run()
    bench.assert_outputs()
    assert computed(bench, 1) == 18 - 4 * num_blocks + 1
    assert computed(bench, 2) <= 11 - 4 * min(num_blocks, 2) + 1


def test_whoever_waits_too_stops_waiting_at_its_own_time() -> None:
    bench = loading()
    bench.handle(Arrive((bench.seq((*PROMPT[:17], 40), max_tokens=2),)))
    bench.ring()
    bench.run_steps_only()
    assert list(bench.finished) == [SeqId(0)]
    bench.ring()
    bench.run_steps_only()
    bench.assert_outputs()
    assert len(bench.finished) == 2
    # Nobody joins what is not worth waiting for.
    bench.handle(Arrive((bench.seq((*PROMPT[:17], 41), max_tokens=2),)))
    assert bench.plan is not None
    bench.end_copy(4, seq_id=0)
    bench.run()
    bench.assert_outputs()
