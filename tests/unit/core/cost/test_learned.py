"""What an engine learns of its own steps: in time, cheaply, and the same from the same steps."""

from itertools import pairwise

import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.plan import SeqStep, StepPlan
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.learned import MIN_SAMPLES, LearnedCost
from headrace.core.cost.model import StepShape
from support.fake_device import LinearCost

PRIOR = FittedCostModel.prior()


def step(step_id: int, *num_tokens: int) -> StepPlan:
    shares = (SeqStep(SeqId(i), 100, (0,) * n, ()) for i, n in enumerate(num_tokens))
    return StepPlan(StepId(step_id), tuple(shares))


def took_ns(plan: StepPlan) -> Ns:
    return Ns(7_000_000 + 900_000 * plan.num_tokens)


def learn(cost: LearnedCost, num_steps: int) -> None:
    for step_id in range(num_steps):
        plan = step(step_id, *(1,) * (step_id % 5), *((20 + step_id % 60,) if step_id % 3 else ()))
        if plan.seqs:
            cost.learn(plan, took_ns(plan))


def test_a_guess_becomes_reliable_and_right() -> None:
    cost = LearnedCost(PRIOR)
    shape = StepShape.of(step(0, 1, 1, 1, 40))
    assert not cost.is_reliable
    assert cost.step_ns(shape) == PRIOR.step_ns(shape)
    learn(cost, 200)
    assert cost.is_reliable
    for plan in (step(0, 1, 1), step(0, 1, 1, 1, 40), step(0, 64)):
        assert cost.step_ns(StepShape.of(plan)) == pytest.approx(took_ns(plan), rel=0.1)


def test_it_tells_what_it_has_learned_and_learns_nothing_by_telling() -> None:
    asked, other = LearnedCost(PRIOR), LearnedCost(PRIOR)
    for cost in (asked, other):
        learn(cost, 200)
    assert asked.told_ns(64) is None  # no fit has been made yet
    shape = StepShape.of(step(0, 64))
    assert asked.step_ns(shape) == other.step_ns(shape)
    told_ns = asked.told_ns(64)
    assert told_ns == pytest.approx(took_ns(step(0, 64)), rel=0.1)
    for cost in (asked, other):
        for step_id in range(60):
            cost.learn(step(step_id, 64), Ns(500_000_000))
        assert asked.told_ns(64) == told_ns
    assert asked.step_ns(shape) == other.step_ns(shape)
    assert asked.told_ns(64) != told_ns


def test_steps_that_only_decode_tell_nothing_of_prompts() -> None:
    """They may take the same however many they are, as on a device that reads weights meanwhile."""
    cost = LearnedCost(PRIOR)
    for step_id in range(400):
        cost.learn(step(step_id, *(1,) * (1 + step_id // 8 % 6)), Ns(6_000_000))
    assert cost.step_ns(StepShape.of(step(0, 1, 1))) == pytest.approx(6_000_000, rel=0.1)
    assert cost.told_ns(512) is None
    for step_id in range(64):
        cost.learn(step(step_id, 64), took_ns(step(0, 64)))
    cost.step_ns(StepShape.of(step(0, 64)))
    assert cost.told_ns(512) == pytest.approx(took_ns(step(0, 512)), rel=0.5)


def test_decoding_alone_makes_it_reliable_too() -> None:
    cost = LearnedCost(PRIOR)
    for step_id in range(MIN_SAMPLES):
        assert not cost.is_reliable
        cost.learn(step(step_id, 1, 1), Ns(5_000_000))
    assert cost.is_reliable
    assert cost.step_ns(StepShape.of(step(0, 1, 1))) == pytest.approx(5_000_000, rel=0.1)


@pytest.mark.parametrize(
    "first", [LinearCost(), FittedCostModel.fit([(StepShape(1, 1, 1, 1, 1), Ns(5))] * MIN_SAMPLES)]
)
def test_what_was_measured_or_vouched_for_is_reliable_at_once(
    first: LinearCost | FittedCostModel,
) -> None:
    cost = LearnedCost(first)
    assert cost.is_reliable
    shape = StepShape(10, 2, 2, 100, 50)
    assert cost.step_ns(shape) == first.step_ns(shape)


def test_the_same_steps_teach_the_same() -> None:
    one, other = LearnedCost(PRIOR), LearnedCost(PRIOR)
    learn(one, 300)
    learn(other, 300)
    for num_tokens in (1, 7, 500):
        shape = StepShape(num_tokens, 1, 1, num_tokens, num_tokens)
        assert one.step_ns(shape) == other.step_ns(shape)


def test_it_follows_a_machine_that_slows_down() -> None:
    cost = LearnedCost(PRIOR)
    plan = step(0, 1, 40)
    for _ in range(3000):
        cost.learn(plan, Ns(10_000_000))
    for _ in range(6000):
        cost.learn(plan, Ns(20_000_000))
    assert cost.step_ns(StepShape.of(plan)) == pytest.approx(20_000_000, rel=0.05)


def test_the_more_it_knows_the_rarer_it_fits() -> None:
    cost = LearnedCost(PRIOR)
    plan = step(0, 1, 40)
    fits = list[int]()  # after so many samples
    for num_samples in range(1, 2001):
        before = cost.current
        cost.learn(plan, Ns(10_000_000 + num_samples))
        if cost.current is not before:
            fits.append(num_samples)
    gaps = [after - one for one, after in pairwise(fits)]
    assert fits[0] == MIN_SAMPLES
    assert gaps[0] == 32
    assert gaps[-1] == 128
    assert gaps == sorted(gaps)


def test_copies_are_the_first_models() -> None:
    cost = LearnedCost(PRIOR)
    learn(cost, 100)
    assert cost.copy_ns(1 << 20, "memory") == PRIOR.copy_ns(1 << 20, "memory")
    with pytest.raises(InvariantError, match="no such link"):
        cost.copy_ns(1, "string")
