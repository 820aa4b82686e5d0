"""KV of a sequence that is expected: it comes while the rest of the prompt is computed elsewhere,
and nothing is held longer than it should be.
"""

import pytest

from headrace.core.base.events import Arrive, Computed, CopyDone, EndLease, Expect
from headrace.core.base.types import NS_PER_S, SeqId
from support.fake_device import Bench, expected_output

PROMPT = tuple(range(18))  # four full blocks of four tokens, and two more
SOURCE = "elsewhere"


def expecting(**settings: object) -> Bench:
    """Another worker computes the prompt of sequence 0, which is to go on here."""
    bench = Bench(**settings)  # type: ignore[arg-type]
    bench.seq(PROMPT, max_tokens=4, kv_source=SOURCE, output_tokens=(first_token(),))
    bench.handle(Expect(seq_id=SeqId(0), tokens=PROMPT, source=SOURCE))
    return bench


def first_token() -> int:
    return expected_output(Bench().seq(PROMPT, max_tokens=1))[0]


def num_computed(bench: Bench) -> int:
    """Tokens of the sequence that was expected."""
    return sum(len(s.tokens) for plan in bench.plans for s in plan.seqs if s.seq_id == 0)


def come(bench: Bench) -> None:
    bench.handle(Arrive((bench.specs[SeqId(0)],)))


def end_piece(bench: Bench, end: int, num_blocks: int) -> None:
    """The copy that is under way is over; it was for the blocks before `end`."""
    (copy,) = bench.copies
    bench.copies.clear()
    bench.device.receive(copy, PROMPT[: 4 * end], num_blocks)
    error = "" if num_blocks == len(copy.names) else "broken off"
    bench.handle(CopyDone(copy.copy_id, num_blocks, error))


def test_blocks_are_taken_at_once_and_come_as_they_are_computed() -> None:
    bench = expecting()
    assert not bench.copies
    assert bench.core.stats().num_lent_blocks == 4
    assert bench.core.is_idle
    bench.handle(Computed(SeqId(0), 6))
    assert [len(copy.names) for copy in bench.copies] == [1]
    bench.handle(Computed(SeqId(0), 12))  # they are asked for when those before are there
    assert len(bench.copies) == 1
    end_piece(bench, 1, 1)
    assert [len(copy.names) for copy in bench.copies] == [2]
    end_piece(bench, 3, 2)
    come(bench)  # only the last block is left
    assert [(len(copy.names), copy.seq_id) for copy in bench.copies] == [(1, SeqId(0))]
    assert bench.plan is None
    end_piece(bench, 4, 1)
    bench.run()
    assert bench.output[SeqId(0)] == expected_output(bench.specs[SeqId(0)])[1:]
    assert num_computed(bench) == 3 + 2
    assert bench.core.stats().num_pinned_blocks == 0


def test_it_may_come_in_the_middle_of_a_copy() -> None:
    bench = expecting()
    bench.handle(Computed(SeqId(0), 8))
    come(bench)
    assert bench.plan is None
    end_piece(bench, 2, 2)
    end_piece(bench, 4, 2)
    bench.run()
    assert num_computed(bench) == 3 + 2


def test_or_when_all_of_it_is_there() -> None:
    bench = expecting()
    bench.handle(Computed(SeqId(0), 18))
    end_piece(bench, 4, 4)
    come(bench)
    assert bench.plan is not None
    bench.run()
    assert num_computed(bench) == 3 + 2


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_what_breaks_off_is_asked_for_once_more_when_the_sequence_is_here(num_blocks: int) -> None:
    bench = expecting()
    bench.handle(Computed(SeqId(0), 8))
    end_piece(bench, 2, num_blocks)
    bench.handle(Computed(SeqId(0), 12))
    assert not bench.copies
    come(bench)
    end_piece(bench, 4, 4 - num_blocks)
    bench.run()
    assert num_computed(bench) == 3 + 2


def test_and_computed_when_it_breaks_off_again() -> None:
    bench = expecting()
    bench.handle(Computed(SeqId(0), 8))
    end_piece(bench, 2, 1)
    come(bench)
    end_piece(bench, 4, 0)
    bench.run()
    assert num_computed(bench) == 18 - 4 + 1 + 2


def test_the_whole_wait_is_bounded_however_many_pieces_come() -> None:
    bench = expecting()
    bench.handle(Computed(SeqId(0), 8))
    come(bench)
    before = bench.now
    end_piece(bench, 2, 2)
    bench.timers = [(at_ns, timer) for at_ns, timer in bench.timers if at_ns < 2 * NS_PER_S]
    bench.ring()
    assert bench.plan is not None
    assert bench.now - before <= NS_PER_S
    bench.run_steps_only()
    assert num_computed(bench) == 18 - 8 + 1 + 2
    end_piece(bench, 4, 2)
    assert bench.core.stats().num_pinned_blocks == 0


@pytest.mark.parametrize("is_copying", [False, True])
def test_nothing_is_held_for_one_that_will_not_come(is_copying: bool) -> None:
    bench = expecting()
    if is_copying:
        bench.handle(Computed(SeqId(0), 8))
    bench.handle(EndLease(SeqId(0)))
    bench.handle(EndLease(SeqId(0)))
    bench.handle(Computed(SeqId(0), 12))
    if is_copying:
        assert bench.core.stats().num_pinned_blocks == 4  # whoever copies still writes
        end_piece(bench, 2, 2)
    assert bench.core.stats().num_pinned_blocks == 0
    assert not bench.copies


def test_nor_longer_than_nobody_speaks_of_it() -> None:
    bench = expecting()
    bench.handle(Computed(SeqId(0), 3), after_ns=5 * NS_PER_S)
    bench.ring()  # of the announcement
    assert bench.core.stats().num_lent_blocks == 4
    bench.ring()
    assert bench.now >= 15 * NS_PER_S
    assert bench.core.stats().num_lent_blocks == 0


def test_whoever_is_here_goes_before_whoever_is_expected() -> None:
    """Else two workers might wait for each other's blocks until a lease ends."""
    bench = expecting(num_blocks=6)
    bench.handle(Arrive((bench.seq(tuple(range(30, 42)), max_tokens=3),)))
    assert bench.core.stats().num_lent_blocks == 0
    bench.run()
    bench.assert_outputs()
    come(bench)
    end_piece(bench, 4, 4)
    bench.run()
    assert num_computed(bench) == 3 + 2


def test_a_sequence_that_is_refused_leaves_nothing_behind() -> None:
    bench = expecting(max_waiting_seqs=0, max_running_seqs=1)
    bench.handle(Arrive((bench.seq(tuple(range(30, 42)), max_tokens=9),)))
    come(bench)
    assert SeqId(0) in bench.rejected
    assert bench.core.stats().num_lent_blocks == 0


def test_blocks_that_are_promised_to_those_who_run_are_not_taken() -> None:
    bench = Bench(num_blocks=7, admission="no_evict")
    bench.handle(Arrive((bench.seq(tuple(range(30, 42)), max_tokens=8),)))  # 3 blocks, then 5
    bench.handle(Expect(seq_id=SeqId(7), tokens=PROMPT, source=SOURCE))
    assert bench.core.stats().num_lent_blocks == 0
    bench.run()
    bench.assert_outputs()
    assert not bench.preempted


def test_a_leased_sequence_tells_how_far_it_is() -> None:
    bench = Bench(step_tokens=8)
    bench.handle(Arrive((bench.seq(PROMPT, max_tokens=1, is_leased=True),)))
    said = [effect for _ in range(3) for effect in bench.step() if isinstance(effect, Computed)]
    assert said == [Computed(SeqId(0), 8), Computed(SeqId(0), 16)]
    bench.handle(EndLease(SeqId(0)))
