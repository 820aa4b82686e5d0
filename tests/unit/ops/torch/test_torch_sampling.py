"""The definition of a choice, one rule at a time."""

from typing import Any

import pytest
import torch

from headrace.core.base.plan import SampleSpec
from headrace.core.base.sampling import SamplingParams
from headrace.ops.interface import RowRequest
from headrace.ops.torch.sampling import adjust, finish_row, sample


def spec_of(
    *, banned: tuple[int, ...] = (), prompt: Any = (), output: Any = (), **params: Any
) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), 9, banned, prompt, output)


def tokens_of(logits: list[float], **params: Any) -> set[int]:
    """What 100 seeds choose."""
    row = torch.tensor(logits)
    return {sample(row, spec_of(seed=seed, **params)) for seed in range(100)}


def test_penalties_come_in_order_and_leave_the_row_alone() -> None:
    row = torch.tensor([4.0, -4.0, 4.0, 4.0, 0.0])
    spec = spec_of(
        prompt=(0, 1),
        output=(2, 2, 2, 4),
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias=((3, 1.0), (0, 10.0)),
        banned=(1,),
    )
    # Repetition falls on prompt and output once, the other two on the output alone.
    expected = [4 / 2 + 10, -torch.inf, 4 / 2 - 3 * 0.5 - 0.25, 4 + 1, 0 - 0.5 - 0.25]
    assert adjust(row, spec).tolist() == expected
    assert row.tolist() == [4.0, -4.0, 4.0, 4.0, 0.0]
    assert adjust(row, spec_of(prompt=(1,), repetition_penalty=2.0))[1] == -8.0


def test_a_bias_does_not_lift_a_ban() -> None:
    adjusted = adjust(torch.zeros(3), spec_of(logit_bias=((1, 100.0),), banned=(1,)))
    assert adjusted.tolist() == [0, -torch.inf, 0]


def test_the_lowest_id_wins_a_tie() -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 3.0])
    assert sample(row, spec_of(temperature=0.0)) == 1
    assert tokens_of([1.0, 3.0, 3.0, 3.0], top_k=2) == {1, 2}


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    halves = [0.0, 0.0]  # two of mass one half
    assert tokens_of(halves, top_p=0.5) == {0}
    assert tokens_of(halves, top_p=0.5001) == {0, 1}
    assert tokens_of(halves, top_p=0.0) == {0}


def test_top_p_counts_what_the_other_cuts_left() -> None:
    equal = [0.0] * 4
    assert tokens_of(equal, top_p=0.5) == {0, 1}
    assert tokens_of(equal, top_k=2, top_p=0.5) == {0}
    # ln 8 apart: masses 8/11, then three of 1/11; min_p leaves the first alone.
    assert tokens_of([2.0794415, 0.0, 0.0, 0.0], min_p=0.13, top_p=0.99) == {0}


def test_min_p_is_a_share_of_the_likeliest() -> None:
    row = [0.0, -0.6931472, -1.3862944]  # 1 : 1/2 : 1/4
    assert tokens_of(row, min_p=0.49) == {0, 1}
    assert tokens_of(row, min_p=0.51) == {0}
    assert tokens_of(row, min_p=0.24) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 1e-310, 5e-324])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    assert tokens_of([1.0, 90.0, 89.0], temperature=temperature) == {1}


def test_a_temperature_flattens() -> None:
    assert tokens_of([10.0, 0.0]) == {0}
    assert tokens_of([10.0, 0.0], temperature=5.0) == {0, 1}


def test_what_is_asked_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="neither"):
        finish_row(torch.zeros(3), RowRequest(None))
    with pytest.raises(ValueError, match="token 3 is outside the vocabulary of 3"):
        finish_row(torch.zeros(3), RowRequest(None, 3, 0))
