"""The solver finds the constrained optimum, whatever is collinear, negative or missing."""

from itertools import product
from random import Random

import pytest

from headrace.core.cost.least_squares import NormalEquations, minimise


def value(quadratic: list[list[float]], linear: list[float], u: list[float]) -> float:
    size = range(len(u))
    square = sum(quadratic[i][j] * u[i] * u[j] for i, j in product(size, size))
    return square / 2 - sum(linear[i] * u[i] for i in size)


@pytest.mark.parametrize("seed", range(30))
def test_minimise_meets_the_conditions_of_an_optimum(seed: int) -> None:
    rng, size = Random(seed), 6
    rows = [[rng.gauss(0, 1) for _ in range(size)] for _ in range(size + 2)]
    quadratic = [
        [sum(row[i] * row[j] for row in rows) + 0.01 * (i == j) for j in range(size)]
        for i in range(size)
    ]
    linear = [rng.gauss(0, 2) for _ in range(size)]
    u = minimise(quadratic, linear)
    for i in range(size):
        slope = linear[i] - sum(quadratic[i][j] * u[j] for j in range(size))
        if u[i] > 0:
            assert slope == pytest.approx(0.0, abs=1e-6)
        else:
            assert u[i] == 0.0
            assert slope <= 1e-6
    assert value(quadratic, linear, u) <= 0.0  # no worse than all zero


@pytest.mark.parametrize("seed", range(30))
def test_what_is_taken_for_likely_changes_nothing(seed: int) -> None:
    rng, size = Random(seed), 6
    rows = [[rng.gauss(0, 1) for _ in range(size)] for _ in range(size + 2)]
    quadratic = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    linear = [rng.gauss(0, 2) for _ in range(size)]
    u = minimise(quadratic, linear)
    for likely in (range(size), rng.sample(range(size), 3), [rng.randrange(size)]):
        assert minimise(quadratic, linear, likely) == pytest.approx(u, abs=1e-6)


def test_samples_add_up_whenever_somebody_asks_between() -> None:
    rng, prior = Random(1), (1.0, 1.0, 1.0)
    asked, not_asked = NormalEquations(3), NormalEquations(3)
    for number in range(300):
        row = (1.0, rng.random(), rng.random() if number % 3 else 0.0)
        value = 2.0 + 3.0 * row[1] + 0.5 * row[2] + 0.1 * rng.random()
        asked.add(row, value)
        not_asked.add(row, value)
        if rng.random() < 0.2:
            asked.solve(prior)
        if number % 100 == 99:
            asked.fade(0.9)
            not_asked.fade(0.9)
    assert asked.weight == not_asked.weight
    assert asked.solve(prior) == pytest.approx(not_asked.solve(prior), rel=1e-9)


def test_a_negative_optimum_is_held_at_zero() -> None:
    u = minimise([[2.0, 0.0], [0.0, 2.0]], [-1.0, 4.0])
    assert u[0] == 0.0
    assert u[1] == pytest.approx(2.0)


def test_samples_overrule_a_prior_of_other_proportions() -> None:
    equations = NormalEquations(2)
    for x in range(1, 200):
        equations.add((1.0, float(x)), 5.0 + 3.0 * x)
    assert equations.solve((1.0, 100.0)) == pytest.approx([5.0, 3.0], rel=0.05)


def test_without_samples_the_prior_stands() -> None:
    assert NormalEquations(2).solve((2.0, 7.0)) == pytest.approx([2.0, 7.0])


def test_what_samples_leave_open_keeps_the_priors_proportion_at_their_speed() -> None:
    equations = NormalEquations(3)
    equations.add((1.0, 1.0, 0.0), 30.0)
    assert equations.solve((1.0, 2.0, 5.0)) == pytest.approx([10.0, 20.0, 50.0])


def test_an_unseen_member_of_a_chain_follows_its_neighbour() -> None:
    equations = NormalEquations(3)
    for x in range(1, 100):
        equations.add((1.0, float(x), 0.0), 10.0 + 20.0 * x)
    loose = equations.solve((10.0, 1.0, 1.0))
    tied = equations.solve((10.0, 1.0, 1.0), chain=range(1, 3))
    assert loose[1] == pytest.approx(20.0, rel=0.01)
    assert abs(tied[2] - 20.0) < abs(loose[2] - 20.0)


def test_faded_samples_count_less_than_fresh_ones() -> None:
    equations = NormalEquations(1)
    for _ in range(100):
        equations.add((1.0,), 10.0)
    equations.fade(0.01)
    assert equations.weight == pytest.approx(1.0)
    for _ in range(100):
        equations.add((1.0,), 20.0)
    assert equations.solve((1.0,))[0] > 19.0
