"""Operations on rows, each against its float64 definition."""

from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

from headrace.core.base.errors import DeviceError
from headrace.ops.interface import KvLayout, TensorView, WeightType
from headrace.ops.native.backend import NativeBackend
from support.ops_rig import (
    BLOCKS,
    GGUF_TYPES,
    apply,
    batch_of,
    compile_rows,
    noise_of,
    run,
    values_of,
    view_of,
    whole_blocks,
)

RNG = np.random.default_rng(7)
EPS = float(np.finfo(np.float32).eps)


def matmul(ops: Any, x: Any, w: Any) -> Any:
    return ops.linear(x, (w["w"],))


def normal(*shape: int, scale: float = 1.0) -> Any:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def spread(x: Any, weight: Any) -> Any:
    """The bound of each float32 dot product in any order: n roundings of the magnitudes' sum."""
    return EPS * (x.shape[1] + 2) * (np.abs(x).astype(float) @ np.abs(weight).T)


# ---- weights


@pytest.mark.parametrize("type", GGUF_TYPES)
def test_stored_weights_mean_what_the_gguf_package_says(type: WeightType) -> None:
    view = noise_of(type, 50, whole_blocks(type, 96), RNG)
    dtype = {WeightType.F32: np.float32, WeightType.F16: np.float16}.get(type, np.uint8)
    stored = np.frombuffer(view.data, dtype).reshape(view.rows, -1)
    theirs = gguf.quants.dequantize(stored, GGUF_TYPES[type])
    assert (values_of(view).astype(np.float32) == theirs).all()


@pytest.mark.parametrize("type", list(WeightType))
@pytest.mark.parametrize("rows", [1, 15, 16, 49])
def test_embed_is_exact(backend: Any, type: WeightType, rows: int) -> None:
    cols = 37 if BLOCKS[type].num_values == 1 else whole_blocks(type, 96)
    for table in (noise_of(type, rows, cols, RNG), view_of(normal(rows, cols), type)):
        handle = backend.load_weight(table)
        program = backend.compile(
            lambda ops, handle=handle: ops.select_logit_rows(ops.embed(handle)),
            KvLayout(1, 1, 2, 8),
            100,
        )
        tokens = [rows - 1, 0, *RNG.integers(0, rows, 60).tolist()]
        out = run(program, batch_of((tokens, 0, range(4))))
        assert (out == values_of(table)[tokens].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("type", "rows", "cols", "num_bytes"),
    [
        (WeightType.F32, 2, 3, 20),
        (WeightType.BF16, 2, 3, 14),
        (WeightType.Q8_0, 2, 64, 4 * 34 + 1),
        (WeightType.Q4_0, 2, 64, 4 * 18 - 18),
        (WeightType.Q4_1, 3, 40, 60),
        (WeightType.Q4_G32, 2, 32, 20),
        (WeightType.Q4_G128, 2, 64, 68),
        (WeightType.Q4_K, 2, 256, 2 * 144 - 1),
        (WeightType.Q6_K, 4, 64, 210),
    ],
)
def test_weights_of_a_wrong_size_are_refused(
    backend: Any, type: WeightType, rows: int, cols: int, num_bytes: int
) -> None:
    with pytest.raises(DeviceError):
        backend.load_weight(TensorView("w", type, rows, cols, memoryview(bytes(num_bytes))))
    assert backend.weight_bytes() == 0


# ---- norms


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


# ---- linear


@pytest.mark.parametrize("type", list(WeightType))
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (15, 96), (49, 64), (130, 320)])
def test_linear(backend: Any, type: WeightType, outputs: int, inputs: int) -> None:
    inputs = whole_blocks(type, inputs)
    for weight in (noise_of(type, outputs, inputs, RNG), view_of(normal(outputs, inputs), type)):
        exact_weight = values_of(weight)
        if np.abs(exact_weight).max() > 1e30:
            continue  # noise in a type whose products leave float32
        x = normal(70, inputs)
        exact, bound = x.astype(float) @ exact_weight.T, spread(x, exact_weight)
        program = compile_rows(backend, matmul, x, {"w": weight})
        for num_rows in (1, 2, 5, 6, 7, 17, 70):
            out = run(program, batch_of((range(num_rows), 0, range(5))))
            assert (np.abs(out - exact[:num_rows]) <= bound[:num_rows]).all(), num_rows


@pytest.mark.parametrize("type", [WeightType.F32, WeightType.F16, WeightType.BF16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (17, 7), (16, 33), (33, 129)])
def test_linear_of_odd_sizes(backend: Any, type: WeightType, outputs: int, inputs: int) -> None:
    x, weight = normal(13, inputs), view_of(normal(outputs, inputs), type)
    exact_weight = values_of(weight)
    out = apply(backend, matmul, x, {"w": weight})
    assert (np.abs(out - x.astype(float) @ exact_weight.T) <= spread(x, exact_weight)).all()


@pytest.mark.parametrize("type", list(WeightType))
def test_every_number_of_rows(backend: Any, type: WeightType) -> None:
    inputs = whole_blocks(type, 96)
    x, weight = normal(70, inputs), view_of(normal(50, inputs), type)
    exact, bound = x.astype(float) @ values_of(weight).T, spread(x, values_of(weight))
    program = compile_rows(backend, matmul, x, {"w": weight})
    outs = [run(program, batch_of((range(n), 0, range(5)))) for n in range(1, 71)]
    for out in outs:
        assert (np.abs(out - exact[: len(out)]) <= bound[: len(out)]).all(), len(out)
        if backend.batch_invariant:
            assert out.tobytes() == outs[-1][: len(out)].tobytes(), len(out)


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
    out = apply(backend, matmul, x, {"w": weight})
    # 32 roundings, all the same way.
    np.testing.assert_allclose(out, np.full((2, 3), value * 16), rtol=32 * EPS)


def test_linear_of_inputs_in_other_orders(backend: Any) -> None:
    """Weights of the same order, of another one and of none, side by side."""
    inputs = 128
    x = normal(19, inputs)
    first, second = RNG.permutation(inputs), RNG.permutation(inputs)
    orders = {"a": first, "b": np.arange(inputs), "c": second, "d": first}
    views = {
        name: view_of(normal(rows, inputs), type)
        for name, type, rows in (
            ("a", WeightType.Q4_G32, 40),
            ("b", WeightType.Q8_0, 17),
            ("c", WeightType.Q4_G128, 16),
            ("d", WeightType.F32, 33),
        )
    }
    weights = {
        name: view if name == "b" else msgspec.structs.replace(view, order=orders[name].tolist())
        for name, view in views.items()
    }
    out = apply(backend, lambda ops, x, w: ops.linear(x, tuple(w.values())), x, weights)
    plain = np.vstack(
        [values_of(view)[:, np.argsort(orders[name])] for name, view in views.items()]
    )
    assert (np.abs(out - x.astype(float) @ plain.T) <= spread(x, plain)).all()


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1]])
def test_what_is_no_order_is_refused(order: list[int]) -> None:
    view = msgspec.structs.replace(view_of(normal(2, 3)), order=order)
    with pytest.raises(DeviceError, match="order"):
        NativeBackend(threads=1).load_weight(view)


def test_linear_takes_a_bias_of_any_type(backend: Any) -> None:
    for type in WeightType:
        outputs = whole_blocks(type, 64)
        x, weight, bias = (
            normal(3, 32),
            view_of(normal(outputs, 32)),
            view_of(normal(1, outputs), type),
        )
        out = apply(
            backend,
            lambda ops, x, w: ops.linear(x, (w["w"],), (w["bias"],)),
            x,
            {"w": weight, "bias": bias},
        )
        exact = x.astype(float) @ values_of(weight).T + values_of(bias)
        np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)


# ---- the rest


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


@pytest.mark.parametrize("logit_rows", [[0], [19], [2, 3, 11], range(20)])
def test_operations_on_the_wanted_rows_alone(backend: Any, logit_rows: Any) -> None:
    """As a model's last norm and head, which follow the selection."""
    x, weight, norm = normal(20, 64), view_of(normal(70, 64), WeightType.Q8_0), normal(1, 64)
    table, head, gain = (backend.load_weight(view) for view in (view_of(x), weight, view_of(norm)))

    def forward(ops: Any) -> Any:
        rows = ops.select_logit_rows(ops.add(ops.embed(table), ops.embed(table)))
        return ops.linear(ops.rms_norm(rows, gain, 1e-5), (head,))

    program = backend.compile(forward, KvLayout(1, 1, 2, 8), 64)
    out = run(program, batch_of((range(20), 0, [0, 1]), logit_rows=logit_rows))
    rows = 2 * x[list(logit_rows)].astype(float)
    exact = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * norm @ values_of(weight).T
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


def test_a_result_that_is_read_twice_stays_valid(backend: Any) -> None:
    """A sum that feeds a norm and the next sum, as a residual does: the two may be fused, and
    their storage may be used again, but not before the last reader.
    """
    x, square, norm = normal(9, 64), view_of(normal(64, 64, scale=0.1)), normal(1, 64)

    def body(ops: Any, x: Any, w: Any) -> Any:
        total = ops.add(x, x)
        normed = ops.rms_norm(total, w["norm"], 1e-5)
        step = ops.linear(normed, (w["square"],))
        return ops.add(ops.add(total, step), ops.add(normed, x))

    out = apply(backend, body, x, {"square": square, "norm": view_of(norm)})
    wide = x.astype(float)
    total = 2 * wide
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) * norm
    exact = total + normed @ values_of(square).T + normed + wide
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)
