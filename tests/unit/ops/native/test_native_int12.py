"""Weights of four bits and inputs of twelve: the bits that docs/adr/0032 says, everywhere."""

from typing import Any

import numpy as np
import pytest

from headrace.ops.interface import TensorView, WeightType
from headrace.ops.native import _native
from headrace.ops.native.backend import NativeBackend
from support.ops_rig import (
    BLOCKS,
    apply,
    linear,
    noise,
    normal,
    values_of,
    view_of,
    whole_blocks,
)

ISAS = _native.usable_isas()
TYPES = [type for type in WeightType if type.name.startswith("Q4")]
OTHERS = [type for type in WeightType if type not in TYPES]
f32 = np.float32


def backend_of(isa: str = "auto", threads: int = 1, activations: str = "int12") -> NativeBackend:
    return NativeBackend(threads=threads, isa=isa, activations=activations)


def fma(a: Any, b: Any, c: Any) -> Any:
    """Of float32 whose product and sum fit float64."""
    return (a.astype(float) * b + c).astype(f32)


def parts_of(whole: Any) -> tuple[Any, Any]:
    high = np.floor((whole + 8) / 16)
    return high, whole - 16 * high


def defined(x: Any, view: TensorView) -> Any:
    """What docs/adr/0032 says, of Q4_0 and Q4_1."""
    raw = np.frombuffer(view.data, np.uint8).reshape(view.rows, -1, BLOCKS[view.type].num_bytes)
    halves = raw[..., :-16].copy().view(np.float16).astype(f32)
    q = np.concatenate([raw[..., -16:] % 16, raw[..., -16:] // 16], -1).astype(float)
    scale = halves[..., :1]
    least = halves[..., 1:] if view.type is WeightType.Q4_1 else scale * f32(-8)
    q = np.where(scale < 0, 15 - q, q)
    centre = fma(np.where(scale < 0, f32(7), f32(8)), scale, least)
    bound = fma(f32(8) * np.ones_like(scale), abs(scale), abs(centre)).max((1, 2))
    inverse = (f32(2000) / bound)[:, None, None]
    s = np.rint(abs(scale).astype(float) * inverse)
    s_high, s_low = s // 16, s % 16
    c_high, c_low = parts_of(np.rint(centre.astype(float) * inverse))
    high = (s_high * (q - 8) + c_high).reshape(view.rows, -1)
    low = (s_low * (q - 8) + c_low).reshape(view.rows, -1)
    assert abs(high).max() <= 127
    assert abs(low).max() <= 128

    greatest = abs(x).max(-1, keepdims=True)
    x_high, x_low = parts_of(np.rint(x.astype(float) * (f32(2032) / greatest)))
    highs = (x_high @ high.T).astype(f32)
    middle = (x_high @ low.T + x_low @ high.T).astype(f32)
    unit = bound * (f32(16) / f32(2000))
    return fma(highs, 16.0, middle) * (unit * (greatest / f32(2032)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", [WeightType.Q4_0, WeightType.Q4_1])
@pytest.mark.parametrize("inputs", [32, 96, 576, 1312])
def test_the_bits_are_those_of_the_definition(isa: str, type: WeightType, inputs: int) -> None:
    x = normal(31, inputs) * np.exp(normal(1, inputs, seed=3))
    weights = [view_of(normal(37, inputs, seed=1), type), noise(type, 37, inputs)]
    for weight in weights:
        expected = defined(x, weight)
        for num_rows in (1, 2, 5, 31):
            out = linear(backend_of(isa), x[:num_rows], weight)
            np.testing.assert_array_equal(out, expected[:num_rows])


@pytest.mark.parametrize("type", TYPES)
def test_errors_are_a_part_of_those_of_int8(type: WeightType) -> None:
    inputs = whole_blocks(type, 576)
    x, weight = normal(31, inputs), view_of(normal(64, inputs, seed=1), type)
    exact = x.astype(float) @ values_of(weight).T

    def error(activations: str) -> float:
        out = linear(backend_of(activations=activations), x, weight)
        return float(np.sqrt(((out - exact) ** 2).mean()) / exact.std())

    assert 0 < error("int12") < min(0.5 * error("int8"), 0.004)


@pytest.mark.parametrize("type", TYPES)
def test_bits_do_not_depend_on_rows_threads_or_instruction_set(type: WeightType) -> None:
    """Heights at which rows are cut into tiles in other ways, more inputs than are decoded at a
    time, and a last block of inputs without its neighbour."""
    inputs = whole_blocks(type, 1184)
    x, weight = normal(200, inputs), noise(type, 37, inputs)
    expected = linear(backend_of("avx2" if "avx2" in ISAS else "auto"), x, weight)
    for isa in ISAS:
        for count in (1, 2, 3, 4, 5, 9, 16, 17, 33):
            out = linear(backend_of(isa, threads=1 + count % 3), x[:count], weight)
            assert out.tobytes() == expected[:count].tobytes(), (isa, count)
    for isa in [isa for isa in ISAS if isa != "portable"]:
        for count in (100, 191, 192, 193, 200):
            out = linear(backend_of(isa, threads=2), x[:count], weight)
            assert out.tobytes() == expected[:count].tobytes(), (isa, count)


@pytest.mark.parametrize("num_rows", [3, 70])
def test_bits_do_not_depend_on_what_the_inputs_come_from(num_rows: int) -> None:
    """Rounded with the norm before, by the layer itself, or after a gate; beside int8."""
    x = normal(num_rows, 256)
    weights = {
        "norm": view_of(normal(1, 256, seed=1)),
        "gate": noise(WeightType.Q4_1, 320, 256),
        "up": noise(WeightType.Q8_0, 320, 256),
        "down": noise(WeightType.Q4_0, 48, 320),
    }
    backend = backend_of(threads=2)

    def chained(ops: Any, x: int, w: Any) -> Any:
        normed = ops.rms_norm(x, w["norm"], 1e-5)
        hidden = ops.silu_mul(ops.linear(normed, (w["gate"], w["up"])))
        return ops.linear(hidden, (w["down"],))

    normed = apply(backend, lambda ops, x, w: ops.rms_norm(x, w["norm"], 1e-5), x, weights)
    both = [linear(backend, normed, weights[name]) for name in ("gate", "up")]
    gated = apply(backend, lambda ops, x, w: ops.silu_mul(x), np.hstack(both), {})
    expected = linear(backend, gated, weights["down"])
    assert apply(backend, chained, x, weights).tobytes() == expected.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", [WeightType.Q4_0, WeightType.Q4_1])
@pytest.mark.parametrize("sign", [1, -1])
def test_at_the_ends_of_the_range(isa: str, type: WeightType, sign: int) -> None:
    """The greatest sums, weights at both ends, and rows of nothing and of nearly nothing."""
    cols = 4096
    raw = np.full((32 * cols // 32, BLOCKS[type].num_bytes), 0xFF, np.uint8)
    raw[: len(raw) // 2, -16:] = 0
    raw[:, :2] = np.array([sign], np.float16).view(np.uint8)
    if type is WeightType.Q4_1:
        raw[:, 2:4] = np.array([-8 * sign], np.float16).view(np.uint8)
    weight = TensorView("w", type, 32, cols, memoryview(raw.tobytes()))
    x = np.ones((6, cols), np.float32)
    x[1], x[2], x[3], x[4] = -1, 0, 1e-38, 3e38
    x = np.tile(x, (3, 1))
    exact = x.astype(float) @ values_of(weight).T
    exact[3::6] = 0.0  # too small to have a scale
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(linear(backend_of(isa), x, weight), exact.astype(f32), rtol=2e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [0.0, 6e-8, 65504.0])
def test_outputs_whose_weights_are_zero_tiny_or_huge(isa: str, scale: float) -> None:
    raw = np.frombuffer(noise(WeightType.Q4_0, 16, 64).data, np.uint8).copy().reshape(-1, 18)
    raw[:, :2] = np.array([scale], np.float16).view(np.uint8)
    weight = TensorView("w", WeightType.Q4_0, 16, 64, memoryview(raw.tobytes()))
    x = normal(7, 64)
    exact = x.astype(float) @ values_of(weight).T
    out = linear(backend_of(isa), x, weight)
    assert (abs(out - exact) <= 4e-3 * (abs(x).astype(float) @ abs(values_of(weight)).T)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_nothing_that_is_no_number_is_hidden(isa: str, broken: float) -> None:
    weight = view_of(normal(16, 96, seed=1), WeightType.Q4_1)
    raw = np.frombuffer(weight.data, np.uint8).copy().reshape(16, 3, 20)
    raw[3, 1, 2:4] = np.array([broken], np.float16).view(np.uint8)
    broken_weight = TensorView("w", WeightType.Q4_1, 16, 96, memoryview(raw.tobytes()))
    for num_rows in (3, 20):
        x = normal(num_rows, 96)
        with np.errstate(all="ignore"):
            assert not np.isfinite(linear(backend_of(isa), x, broken_weight)[:, 3]).any()
            x[1, 50] = broken
            out = linear(backend_of(isa), x, weight)
        assert np.isnan(out[1]).all()
        assert np.isfinite(np.delete(out, 1, axis=0)).all()


@pytest.mark.parametrize("type", OTHERS)
def test_other_weights_are_as_with_int8(type: WeightType) -> None:
    inputs = whole_blocks(type, 96)
    x, weight = normal(20, inputs), view_of(normal(16, inputs, seed=1), type)
    int8 = linear(backend_of(activations="int8"), x, weight)
    assert linear(backend_of(), x, weight).tobytes() == int8.tobytes()
