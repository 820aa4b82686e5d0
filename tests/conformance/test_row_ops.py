"""Operations on rows, each against its float64 definition."""

from typing import Any

import numpy as np
import pytest

from headrace.ops.interface import KvLayout, WeightType
from support.ops_rig import apply, batch_of, compile_rows, run, values_of, view_of

RNG = np.random.default_rng(7)
EPS = float(np.finfo(np.float32).eps)


def normal(*shape: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("type", list(WeightType))
def test_embed_is_exact(backend: Any, type: WeightType) -> None:
    table = view_of(normal(37, 64), type)
    handle = backend.load_weight(table)
    program = backend.compile(
        lambda ops: ops.select_logit_rows(ops.embed(handle)), KvLayout(1, 1, 2, 4), 64
    )
    tokens = [36, 0, 5, 5, 17]
    out = run(program, batch_of((tokens, 0, [0])))
    # Q4_1 needs one rounding (scale * q + minimum); the others are exact in float32.
    np.testing.assert_allclose(out, values_of(table)[tokens], rtol=2 * EPS, atol=1e-7)


@pytest.mark.parametrize("cols", [1, 7, 64, 577])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(backend: Any, cols: int, scale: float) -> None:
    x, weight = normal(9, cols, scale=scale), normal(1, cols)
    out = apply(backend, lambda ops, x, w: ops.rms_norm(x, w["w"], 1e-5), x, {"w": view_of(weight)})
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    # Summing n squares in float32 loses at most n / 2 roundings in any order.
    np.testing.assert_allclose(out, exact, rtol=EPS * (cols / 2 + 8), atol=1e-30)


def test_rms_norm_of_zeros_is_zero(backend: Any) -> None:
    out = apply(
        backend,
        lambda ops, x, w: ops.rms_norm(x, w["w"], 1e-5),
        np.zeros((3, 32), np.float32),
        {"w": view_of(normal(1, 32))},
    )
    assert (out == 0).all()


@pytest.mark.parametrize("type", list(WeightType))
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 17, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (15, 96), (49, 64), (130, 320)])
def test_linear(backend: Any, type: WeightType, num_rows: int, outputs: int, inputs: int) -> None:
    x, weight = normal(num_rows, inputs), view_of(normal(outputs, inputs), type)
    out = apply(backend, lambda ops, x, w: ops.linear(x, (w["w"],)), x, {"w": weight})
    exact_weight = values_of(weight)
    # The bound of a float32 dot product in any order: n roundings of the sum of magnitudes.
    bound = EPS * (inputs + 2) * (np.abs(x).astype(np.float64) @ np.abs(exact_weight).T)
    assert (np.abs(out - x.astype(np.float64) @ exact_weight.T) <= bound).all()


def test_linear_of_several_types_with_biases(backend: Any) -> None:
    x = normal(11, 64)
    weights = {
        "a": view_of(normal(33, 64), WeightType.Q4_1),
        "b": view_of(normal(5, 64), WeightType.F16),
        "c": view_of(normal(18, 64), WeightType.Q8_0),
        "bias": view_of(normal(1, 5)),
    }
    out = apply(
        backend,
        lambda ops, x, w: ops.linear(x, (w["a"], w["b"], w["c"]), (None, w["bias"], None)),
        x,
        weights,
    )
    exact = np.concatenate([x @ values_of(weights[name]).T for name in "abc"], -1)
    exact[:, 33:38] += values_of(weights["bias"])
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [1e-30, 1e18, -1e18])
def test_linear_of_extreme_values(backend: Any, value: float) -> None:
    x = np.full((2, 32), value, np.float32)
    weight = view_of(np.full((3, 32), 0.5, np.float32), WeightType.BF16)
    out = apply(backend, lambda ops, x, w: ops.linear(x, (w["w"],)), x, {"w": weight})
    np.testing.assert_allclose(out, np.full((2, 3), value * 16), rtol=1e-5)


def test_add(backend: Any) -> None:
    x, weight = normal(5, 64), view_of(normal(64, 64))
    out = apply(backend, lambda ops, x, w: ops.add(x, ops.linear(x, (w["w"],))), x, {"w": weight})
    np.testing.assert_allclose(out, x + x @ values_of(weight).T, rtol=1e-4, atol=1e-4)


def test_silu_mul(backend: Any) -> None:
    x = np.concatenate(
        [np.linspace(-100, 100, 4 * 48).reshape(4, 48), RNG.standard_normal((4, 48))], -1
    ).astype(np.float32)
    out = apply(backend, lambda ops, x, w: ops.silu_mul(x), x)
    gate, up = x[:, :48].astype(np.float64), x[:, 48:].astype(np.float64)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-30)


def test_only_wanted_rows_come_out(backend: Any) -> None:
    x = normal(20, 16)
    program = compile_rows(backend, lambda ops, x, w: x, x)
    out = run(program, batch_of((range(20), 0, [0, 1]), logit_rows=[0, 3, 19]))
    assert (out == x[[0, 3, 19]]).all()
    program.run(batch_of((range(20), 0, [0, 1]), logit_rows=[]))
    assert program.logits() == []
