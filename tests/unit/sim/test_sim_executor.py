"""The executor without a device."""

import msgspec
import pytest

from headrace.adapters.executors.sim import FakeSteps, SimExecutor
from headrace.core.base.errors import DeviceError
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import SampleSpec, SeqStep, StepPlan, WorkerSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, SeqId, StepId
from headrace.core.cost.model import StepShape
from headrace.sim.runtime import SimRuntime
from support.fake_device import LinearCost

SPEC = WorkerSpec(
    model_digest="00", kv_dtype="bf16", block_size=16, num_blocks=8, max_model_len=128, vocab_size=7
)


def plan_of(
    step: int = 0,
    *,
    seq: int = 5,
    position: int = 3,
    banned: tuple[int, ...] = (),
    **params: object,
) -> StepPlan:
    sample = SampleSpec(SamplingParams(**params), position, banned)  # type: ignore[arg-type]
    share = SeqStep(SeqId(seq), 0, (1, 2, 3), (BlockId(0),), sample)
    return StepPlan(StepId(step), (share,))


def result_of(plan: StepPlan, *, seed: int = 0) -> StepDone:
    end, _ = FakeSteps(LinearCost(), 7, seed=seed).outcome(plan)
    assert isinstance(end, StepDone)
    return end


def tokens_of(plan: StepPlan, *, seed: int = 0) -> tuple[int, ...]:
    return result_of(plan, seed=seed).result.seqs[0].tokens


def test_a_step_takes_what_the_cost_model_says_and_reports_once() -> None:
    runtime = SimRuntime()
    executor = SimExecutor(SPEC, FakeSteps(LinearCost(), 7), runtime.call_later)
    plan, seen = plan_of(), []
    executor.start(plan, lambda end: seen.append((runtime.now, end)))
    assert not seen
    runtime.run(max_calls=10)
    expected_ns = LinearCost().step_ns(StepShape.of(plan))
    ((now, end),) = seen
    assert now == expected_ns
    assert end == result_of(plan)
    assert end.result.elapsed_ns == expected_ns


def test_one_step_runs_one_waits_and_none_starts_after_close() -> None:
    runtime = SimRuntime()
    executor = SimExecutor(SPEC, FakeSteps(LinearCost(), 7), runtime.call_later)
    seen: list[tuple[int, StepDone | StepFailed]] = []

    def on_done(end: StepDone | StepFailed) -> None:
        seen.append((runtime.now, end))

    executor.start(plan_of(0), on_done)
    executor.start(plan_of(1), on_done)
    with pytest.raises(DeviceError, match="two steps run already"):
        executor.start(plan_of(2), on_done)
    runtime.run(max_calls=10)
    took_ns = LinearCost().step_ns(StepShape.of(plan_of(0)))
    assert seen == [(took_ns, result_of(plan_of(0))), (2 * took_ns, result_of(plan_of(1)))]
    executor.start(plan_of(2), on_done)
    executor.start(plan_of(3), on_done)
    executor.close()
    executor.close()
    assert len(seen) == 4
    runtime.run(max_calls=10)
    assert len(seen) == 4
    with pytest.raises(DeviceError, match="closed"):
        executor.start(plan_of(4), on_done)


def test_a_step_that_was_planned_ahead_of_a_failed_one_fails() -> None:
    runtime = SimRuntime()
    executor = SimExecutor(SPEC, FakeSteps(LinearCost(), 7, failure_rate=1.0), runtime.call_later)
    seen: list[StepDone | StepFailed] = []
    executor.start(plan_of(0), seen.append)
    executor.start(msgspec.structs.replace(plan_of(1), is_ahead=True), seen.append)
    runtime.run(max_calls=10)
    assert [end.error for end in seen if isinstance(end, StepFailed)] == [
        "simulated fault",
        "the step before has failed",
    ]


def test_tokens_depend_on_seed_sequence_and_position_only() -> None:
    assert tokens_of(plan_of(0)) == tokens_of(plan_of(9))
    by_position = {tokens_of(plan_of(position=i)) for i in range(40)}
    by_seq = {tokens_of(plan_of(seq=i)) for i in range(40)}
    by_seed = {tokens_of(plan_of(), seed=i) for i in range(40)}
    by_request_seed = {tokens_of(plan_of(seed=i)) for i in range(40)}
    assert {len(by_position), len(by_seq), len(by_seed), len(by_request_seed)} == {7}


def test_banned_tokens_are_not_chosen() -> None:
    for position in range(30):
        assert tokens_of(plan_of(position=position, banned=(0, 1, 2, 4, 5, 6))) == (3,)


def test_log_probabilities_come_as_asked() -> None:
    (seq,) = result_of(plan_of(logprobs=2)).result.seqs
    (logprob,) = seq.logprobs
    assert logprob.token_id == seq.tokens[0]
    assert logprob.top[0][0] == seq.tokens[0]
    assert len(logprob.top) == 2
    share = SeqStep(SeqId(1), 0, (1, 2, 3), (BlockId(0),), None, 1, 4)
    (seq,) = result_of(StepPlan(StepId(0), (share,))).result.seqs
    assert seq.tokens == ()
    assert [one.token_id for one in seq.prompt_logprobs] == [2, 3, 4]


def test_the_share_of_failures_is_as_asked() -> None:
    steps = FakeSteps(LinearCost(), 7, seed=1, failure_rate=0.25)
    ends = [steps.outcome(plan_of(i))[0] for i in range(2000)]
    assert 400 < sum(isinstance(end, StepFailed) for end in ends) < 600
    assert ends == [steps.outcome(plan_of(i))[0] for i in range(2000)]
