"""A step's shape is the sum of its shares' shapes."""

from headrace.core.base.plan import SampleSpec, SeqStep, StepPlan
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, SeqId, StepId
from headrace.core.cost.model import StepShape

SAMPLE = SampleSpec(SamplingParams(), 0)


def share(start: int, num_tokens: int, *, samples: bool, scores: bool = False) -> SeqStep:
    return SeqStep(
        SeqId(start),
        start,
        (1,) * num_tokens,
        (BlockId(0),),
        SAMPLE if samples else None,
        0 if scores else None,
    )


def pairs(start: int, num_tokens: int) -> int:
    """The definition, token by token: each attends to all before it and itself."""
    return sum(position + 1 for position in range(start, start + num_tokens))


def test_shapes_of_shares_add_up_to_the_plans() -> None:
    shares = (
        share(40, 1, samples=True),
        share(0, 16, samples=False),
        share(8, 5, samples=True, scores=True),
    )
    whole = StepShape.of(StepPlan(StepId(0), shares))
    assert whole == StepShape(
        22, 3, 1 + 0 + 5, pairs(40, 1) + pairs(0, 16) + pairs(8, 5), 41 + 16 + 13
    )
    one, two, three = map(StepShape.of_share, shares)
    assert one + two + three == whole
    assert whole - two == StepShape.of(StepPlan(StepId(0), (shares[0], shares[2])))


def test_a_skipped_beginning_counts_as_computed_before() -> None:
    assert StepShape.of_share(share(8, 6, samples=True), skip=4) == StepShape.of_share(
        share(12, 2, samples=True)
    )
