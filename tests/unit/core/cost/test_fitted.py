"""Fits find synthetic truths under noise, keep the laws of a cost, and survive poor samples."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import Ns
from headrace.core.cost.fitted import FittedCostModel, Link, OnlineFit
from headrace.core.cost.formula import KNOTS
from headrace.core.cost.model import StepShape

PRIOR = FittedCostModel.prior()
Samples = list[tuple[StepShape, Ns]]


def decode(num_seqs: int, num_kv: int) -> StepShape:
    return StepShape(num_seqs, num_seqs, num_seqs, num_seqs * num_kv, num_seqs * num_kv)


def prefill(num_tokens: int, start: int = 0, *, samples: bool = True) -> StepShape:
    pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return StepShape(num_tokens, 1, int(samples), pairs, start + num_tokens)


def random_shape(rng: Random) -> StepShape:
    """A decode, prefill or mixed step."""
    num_decode = rng.choice([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    shape = StepShape(0, 0, 0, 0, 0)
    for _ in range(num_decode):
        shape += decode(1, rng.randrange(16, 1500))
    if not num_decode or rng.random() < 0.4:
        start = rng.choice([0, 0, 128, 512])
        shape += prefill(rng.randrange(2, 480), start, samples=rng.random() < 0.5)
    return shape


def true_ns(shape: StepShape, knee: int) -> float:
    """Bandwidth-bound below `knee` tokens, linear above."""
    return (
        1.2e6 * max(knee, shape.num_tokens)
        + 3e5
        + 1e4 * shape.num_seqs
        + 8e4 * shape.num_logit_rows
        + 250 * shape.num_attention_pairs
        + 900 * shape.num_kv_tokens
    )


def samples(seed: int, knee: int, noise: float, count: int = 400) -> Samples:
    rng = Random(seed)
    shapes = [random_shape(rng) for _ in range(count)]
    return [(shape, Ns(round(true_ns(shape, knee) * rng.gauss(1, noise)))) for shape in shapes]


@pytest.mark.parametrize("knee", [1, 3, 6, 11, 24, 90])
def test_both_regimes_are_predicted_through_noise(knee: int) -> None:
    model = FittedCostModel.fit(samples(1, knee, noise=0.05))
    error = model.residuals(samples(2, knee, noise=0.0))
    assert error.mean < 0.03
    assert error.max < 0.15
    for num_seqs in (1, 2, 4, 8, 16, 32):
        shape = decode(num_seqs, 700)
        assert model.step_ns(shape) == pytest.approx(true_ns(shape, knee), rel=0.15)


def test_a_steeper_machine_than_the_prior_is_extrapolated_beyond_the_samples() -> None:
    model = FittedCostModel.fit(samples(3, knee=6, noise=0.02))
    for num_tokens in (700, 1000, 4000):
        shape = prefill(num_tokens)
        assert model.step_ns(shape) == pytest.approx(true_ns(shape, 6), rel=0.15)


def test_stalls_move_the_fit_little() -> None:
    """One step in fifty takes ten times as long: somebody else had the core."""
    steps = samples(4, knee=6, noise=0.02)
    stalled = [
        (shape, Ns(elapsed * (10 if i % 50 == 0 else 1)))
        for i, (shape, elapsed) in enumerate(steps)
    ]
    assert FittedCostModel.fit(stalled).residuals(samples(5, 6, noise=0.0)).p90 < 0.15


def test_costs_that_fall_with_work_are_held_flat() -> None:
    falling = [(decode(n, 100), Ns(10_000_000 - 100_000 * n)) for n in range(1, 60)]
    model = FittedCostModel.fit(falling)
    assert all(cost >= 0.0 for cost in model._coefficients())
    assert model.step_ns(decode(32, 100)) == pytest.approx(7_000_000, rel=0.35)


fits = st.lists(
    st.tuples(
        st.builds(
            StepShape,
            st.integers(1, 600),
            st.integers(1, 64),
            st.integers(0, 64),
            st.integers(1, 100_000),
            st.integers(1, 10_000),
        ),
        st.integers(0, 10**10).map(Ns),
    ),
    max_size=12,
)


@given(fits, st.integers(1, 3000), st.integers(0, 500))
def test_any_fit_is_at_least_1_and_grows_with_tokens(
    steps: Samples, num_tokens: int, more: int
) -> None:
    model = FittedCostModel.fit(steps)
    shape = StepShape(num_tokens, 2, 2, 50, 50)
    larger = StepShape(num_tokens + more, 2, 2, 50, 50)
    assert 1 <= model.step_ns(shape) <= model.step_ns(larger)


def test_one_sample_sets_the_speed_of_the_prior() -> None:
    model = FittedCostModel.fit([(decode(1, 100), Ns(4_000_000))])
    assert model.step_ns(decode(1, 100)) == pytest.approx(4_000_000, rel=1e-3)
    speed = 4_000_000 / PRIOR.step_ns(decode(1, 100))
    assert model.step_ns(prefill(512)) == pytest.approx(
        PRIOR.step_ns(prefill(512)) * speed, rel=0.01
    )


def test_time_that_samples_leave_open_is_divided_as_the_prior_would() -> None:
    """Steps of one size and of one row of logits do not tell what the row costs: hardly anything,
    the prior says, even where it has the rest wrong.
    """
    flat = [(StepShape(1, 1, 1, 1, 1), Ns(1010))]
    flat += [(StepShape(26, 3, 1, 328 + 534 * i, 28 + 26 * i), Ns(1260)) for i in range(15)]
    model = FittedCostModel.fit(flat)
    assert model.step_ns(StepShape(26, 4, 3, 158, 64)) == pytest.approx(1260, rel=0.03)
    assert model.step_ns(StepShape(26, 3, 1, 20_000, 1000)) == pytest.approx(1260, rel=0.03)


def test_equal_shapes_fit_their_mean() -> None:
    steps = [(decode(8, 300), Ns(9_000_000 + 10_000 * i)) for i in range(-50, 51)]
    assert FittedCostModel.fit(steps).step_ns(decode(8, 300)) == pytest.approx(9_000_000, rel=0.02)


def test_no_samples_are_the_prior_and_no_time_is_1_ns() -> None:
    assert FittedCostModel.fit([]) == PRIOR
    assert FittedCostModel.fit([(decode(1, 1), Ns(0))]).step_ns(decode(1, 1)) >= 1


def test_the_prior_is_flat_then_linear() -> None:
    single = PRIOR.step_ns(decode(1, 100))
    assert PRIOR.step_ns(decode(4, 100)) < 2 * single
    assert 1.8 < PRIOR.step_ns(prefill(512)) / PRIOR.step_ns(prefill(256)) < 2.4
    assert "135M" in PRIOR.name


# ---- one by one


def test_samples_one_by_one_fit_as_all_at_once() -> None:
    steps = samples(6, knee=6, noise=0.05, count=100)
    online = OnlineFit()
    for shape, elapsed_ns in steps:
        online.add(shape, elapsed_ns)
    assert online.num_samples == 100
    assert online.fit("x") == FittedCostModel.fit(steps, name="x")


def test_with_a_half_life_a_slower_machine_is_followed() -> None:
    rng, online = Random(7), OnlineFit(half_life=40)
    shapes = [random_shape(rng) for _ in range(400)]
    for shape in shapes:
        online.add(shape, Ns(round(true_ns(shape, 6))))
    for shape in shapes:
        online.add(shape, Ns(round(3 * true_ns(shape, 6))))
    slower = [(shape, Ns(round(3 * true_ns(shape, 6)))) for shape in shapes]
    assert online.fit().residuals(slower).mean < 0.05
    assert OnlineFit().fit() == PRIOR


def test_residuals_report_the_errors_they_are_given() -> None:
    shape = decode(1, 100)
    predicted = PRIOR.step_ns(shape)
    error = PRIOR.residuals([(shape, Ns(predicted)), (shape, Ns(2 * predicted))])
    assert (error.num_samples, error.p50, error.max) == (2, 0.0, 0.5)
    assert (error.mean, error.bias) == (0.25, -0.25)
    with pytest.raises(ValueError, match="no samples"):
        PRIOR.residuals([])


# ---- links and serialisation


def test_a_link_is_fitted_to_latency_and_bandwidth() -> None:
    rng = Random(8)
    copies = [
        (size, Ns(round((150_000 + size / 5) * rng.gauss(1, 0.03))))
        for size in (rng.choice([1 << 12, 1 << 16, 1 << 20, 1 << 24]) for _ in range(200))
    ]
    link = Link.fit(copies)
    assert link.latency_ns == pytest.approx(150_000, rel=0.05)
    assert link.bytes_per_s == pytest.approx(5e9, rel=0.05)
    model = PRIOR.with_link("peer", link)
    assert model.copy_ns(1 << 20, "peer") == pytest.approx(150_000 + (1 << 20) / 5, rel=0.05)
    assert model.step_ns(decode(1, 1)) == PRIOR.step_ns(decode(1, 1))
    assert "peer" not in PRIOR.links


def test_an_unknown_link_is_our_own_mistake() -> None:
    with pytest.raises(InvariantError, match="no such link"):
        PRIOR.copy_ns(1, "wormhole")


@pytest.mark.parametrize("codec", [msgspec.json, msgspec.msgpack])
def test_a_model_survives_the_log(codec: object) -> None:
    model = FittedCostModel.fit(samples(9, 6, 0.05)).with_link("peer", Link(1.0, 2.0))
    data = codec.encode(model)  # type: ignore[attr-defined]
    assert codec.decode(data, type=FittedCostModel) == model  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        {"knot_ns": (1.0,) * (len(KNOTS) - 1)},
        {"knot_ns": (2.0,) + (1.0,) * (len(KNOTS) - 1)},
        {"seq_ns": -1.0},
        {"kv_token_ns": float("nan")},
    ],
)
def test_a_model_that_breaks_the_laws_is_not_read(change: dict[str, object]) -> None:
    fields = {**msgspec.to_builtins(PRIOR), **change}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, FittedCostModel)
