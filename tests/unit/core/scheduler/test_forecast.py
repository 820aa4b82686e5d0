"""What is due, as workers tell it to routers."""

from headrace.core.base.events import Arrive
from support.fake_device import Bench


def test_prefill_that_is_due_leaves_out_what_is_cached_and_what_decodes() -> None:
    bench = Bench(step_tokens=8, max_running_seqs=1)
    bench.handle(Arrive((bench.seq(tuple(range(16)), max_tokens=1),)))
    bench.run()
    first = bench.seq(tuple(range(16)), max_tokens=4)
    second = bench.seq((*range(12), 30, 31, 32), max_tokens=4)
    bench.handle(Arrive((first, second)))
    # The first runs, and only its last token is not cached; of the second's 15, 12 are.
    assert bench.core.stats().num_prefill_tokens == 3
    bench.run()
    assert bench.core.stats().num_prefill_tokens == 0
