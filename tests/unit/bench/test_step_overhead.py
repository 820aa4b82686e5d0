"""The microbenchmark measures steps in which everything runs and nothing else happens."""

from headrace.bench.scheduler import fill, measure, result_of
from headrace.core.base.events import StartStep, StepDone
from headrace.core.base.types import Ns


def test_every_step_is_counted_once() -> None:
    overhead = measure(num_seqs=5, num_steps=7)
    assert (overhead.num_running_seqs, overhead.num_steps) == (5, 7)
    assert 0 < overhead.step_us.p50 <= overhead.step_us.p99


def test_the_steady_state_has_every_sequence_in_every_step() -> None:
    core, plan = fill(num_seqs=20, num_output_tokens=64)
    for now in range(1, 30):
        effects = core.handle(Ns(now), StepDone(result_of(plan)))
        plan = next(effect.plan for effect in effects if isinstance(effect, StartStep))
    assert plan.num_tokens == len(plan.seqs) == core.stats().num_running == 20
