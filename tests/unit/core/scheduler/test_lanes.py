"""Lanes and turns, asked directly: nothing is lost, nobody is left behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.base.types import SeqId
from headrace.core.scheduler.lanes import DeficitRoundRobin, ShortShare

A, B, C = SeqId(1), SeqId(2), SeqId(3)
PLENTY = 10**6


def ring(*members: SeqId, quantum: int = 10) -> DeficitRoundRobin:
    turns = DeficitRoundRobin(quantum)
    for member in members:
        turns.join(member)
    return turns


def test_a_turn_is_a_quantum_and_goes_on_where_the_budget_cut_it() -> None:
    turns = ring(A, B)
    wants = {A: PLENTY, B: PLENTY}
    assert turns.allot(wants, 4) == {A: 4}
    assert turns.allot(wants, 4) == {A: 4}
    assert turns.allot(wants, 4) == {A: 2, B: 2}
    assert turns.allot(wants, 30) == {B: 18, A: 12}


def test_who_wants_no_more_leaves_its_turn_to_others() -> None:
    turns = ring(A, B)
    assert turns.allot({A: 3, B: PLENTY}, 20) == {A: 3, B: 17}
    assert turns.allot({}, 20) == {}
    assert ring().allot({}, 20) == {}


@given(asks=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12))
def test_who_is_alone_has_what_it_has_beside_those_who_want_nothing(
    asks: list[tuple[int, int]],
) -> None:
    alone, beside = ring(A), ring(A, B)
    for want, budget in asks:
        assert alone.allot({A: want}, budget) == beside.allot({A: want}, budget)
    alone.join(B)
    wants = {A: PLENTY, B: PLENTY}
    given_alone, given_beside = alone.allot(wants, 35), beside.allot(wants, 35)
    assert abs(given_alone[A] - given_beside[A]) <= 10  # whose turn it is


def test_those_who_leave_are_gone() -> None:
    turns = ring(A, B)
    turns.leave(A)
    turns.leave(A)
    assert len(turns) == 1
    assert turns.allot({A: 5, B: 5}, 20) == {B: 5}


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 60)), max_size=60),
    st.integers(1, 20),
)
def test_none_gets_ahead_by_more_than_two_quanta(
    steps: list[tuple[int, int, int]], quantum: int
) -> None:
    """Members that always want more than their turn, whatever the budgets of the steps."""
    turns = ring(A, B, C, quantum=quantum)
    totals = dict.fromkeys((A, B, C), 0)
    for budget, more_a, more_b in steps:
        wants = {A: quantum + more_a, B: quantum + more_b, C: PLENTY}
        given_out = turns.allot(wants, min(budget, quantum))
        assert sum(given_out.values()) == min(budget, quantum)
        for member, num_tokens in given_out.items():
            totals[member] += num_tokens
        assert max(totals.values()) - min(totals.values()) <= 2 * quantum


@given(
    st.lists(st.integers(0, 50), min_size=1),
    st.integers(0, 100),
    st.dictionaries(st.sampled_from([A, B, C]), st.integers(0, 50)),
)
def test_all_of_the_budget_is_given_where_it_is_wanted(
    budgets: list[int], quantum: int, wants: dict[SeqId, int]
) -> None:
    turns = ring(A, B, C, quantum=quantum + 1)
    for budget in budgets:
        given_out = turns.allot(wants, budget)
        assert sum(given_out.values()) == min(budget, sum(wants.values()))
        assert all(0 < num <= wants[member] for member, num in given_out.items())


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 100])
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.99])
def test_a_lane_gets_its_share_in_the_long_run(num_tokens: int, share: float) -> None:
    lanes = ShortShare(share)
    num_short = 0
    for step in range(1, 201):
        part = lanes.part_of(num_tokens)
        assert 0 <= part <= num_tokens
        num_short += part
        assert abs(num_short - share * num_tokens * step) < 1.001
