"""Who is let in: the arithmetic of promised blocks, and what is said of the time it would take."""

import pytest

from headrace.core.base.events import Arrive
from headrace.core.base.request import Slo
from headrace.core.base.types import SeqId
from support.fake_device import Bench

PREFIX = tuple(range(17))  # four blocks that may be shared, and the token that has to be computed
FIRST, SECOND, THIRD = SeqId(0), SeqId(1), SeqId(2)


def planned(bench: Bench) -> set[SeqId]:
    assert bench.plan is not None
    return {share.seq_id for share in bench.plan.seqs}


def test_blocks_that_are_cached_are_no_gift_while_nobody_holds_them() -> None:
    """Taking them leaves less for what others were promised."""
    bench = Bench(num_blocks=8, admission="no_evict")
    bench.handle(Arrive((bench.seq(PREFIX, max_tokens=1),)))
    bench.run()
    # Two blocks now and two more promised; so four of eight are left, all of them the prefix.
    bench.handle(Arrive((bench.seq((40,) * 8, max_tokens=8),)))
    bench.handle(Arrive((bench.seq(PREFIX, max_tokens=7),)))  # six blocks, of which four are known
    bench.step()
    while SECOND not in bench.finished:
        assert planned(bench) == {SECOND}
        bench.step()
    bench.run()
    assert not bench.preempted
    assert bench.finished.keys() == {FIRST, SECOND, THIRD}
    bench.assert_outputs()


def test_blocks_that_others_hold_are_a_gift() -> None:
    bench = Bench(num_blocks=8, admission="no_evict")
    bench.handle(Arrive((bench.seq(PREFIX, max_tokens=3),)))  # five blocks
    bench.step()
    bench.handle(Arrive((bench.seq(PREFIX, max_tokens=7, seed=1),)))  # six, four of them the same
    bench.step()
    assert planned(bench) == {FIRST, SECOND}
    bench.run()
    bench.assert_outputs()


@pytest.mark.parametrize("ahead", ["one that decodes", "a prompt that runs", "one that waits"])
def test_the_predicted_time_counts_what_runs_and_what_waits(ahead: str) -> None:
    """Beside one that decodes it takes two steps of 1 µs; 32 tokens of others take four more."""
    bench = Bench(early_reject=True, step_tokens=8, max_running_seqs=1, budget="fixed")
    running = (2,) * 40 if ahead == "a prompt that runs" else (2,)
    bench.handle(Arrive((bench.seq(running, max_tokens=9),)))
    bench.step()
    if ahead == "one that waits":
        bench.handle(Arrive((bench.seq((3,) * 32, max_tokens=1),)))
    last = bench.seq((4,) * 8, max_tokens=1, slo=Slo(ttft_ms=0.003))
    bench.handle(Arrive((last,)))
    if ahead == "one that decodes":
        assert not bench.rejected
    else:
        assert bench.rejected[last.seq_id].code == "ttft_unattainable"
    bench.run()
