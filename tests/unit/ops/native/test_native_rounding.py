"""Activations rounded to int8: near the exact ones, the same bits everywhere."""

from typing import Any

import numpy as np
import pytest

from headrace.ops.interface import TensorView, WeightType
from headrace.ops.native import _native
from headrace.ops.native.backend import NativeBackend
from support import groups
from support.ops_rig import (
    BLOCKS,
    apply,
    linear,
    noise,
    noise_of,
    normal,
    values_of,
    view_of,
    whole_blocks,
)

ISAS = _native.usable_isas()
INT8_TYPES = [type for type in WeightType if BLOCKS[type].num_values > 1]


def exact_backend() -> NativeBackend:
    return NativeBackend(threads=1, activations="f32")


def int8_backend(isa: str = "auto", threads: int = 1) -> NativeBackend:
    return NativeBackend(threads=threads, isa=isa, activations="int8")


def to_int8(x: Any) -> Any:
    """Rows in blocks of 32, each rounded to 255 levels of its own: (levels, scales)."""
    blocks = x.reshape(len(x), -1, 32)
    greatest = np.abs(blocks).max(-1, keepdims=True)
    factor = (np.float32(127) / np.where(greatest > 0, greatest, 1)).astype(np.float32)
    levels = np.rint(blocks.astype(np.float64) * factor)
    return levels, greatest / np.float32(127)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", INT8_TYPES)
@pytest.mark.parametrize("inputs", [32, 96, 544])
def test_int8_activations(isa: str, type: WeightType, inputs: int) -> None:
    inputs = whole_blocks(type, inputs)
    x = normal(31, inputs) * np.exp(normal(1, inputs, seed=3))
    weight = noise(type, 37, inputs)
    levels, scales = to_int8(x)
    exact = (levels * scales.astype(np.float64)).reshape(x.shape) @ values_of(weight).T
    tolerance = 2e-6 * np.abs(x).astype(np.float64) @ np.abs(values_of(weight)).T
    out = linear(int8_backend(isa), x, weight)
    assert (np.abs(out - exact) <= tolerance + 1e-30).all()


@pytest.mark.parametrize("type", INT8_TYPES)
def test_int8_activations_are_near_the_exact_ones(type: WeightType) -> None:
    inputs = whole_blocks(type, 576)
    x, weight = normal(31, inputs), view_of(normal(64, inputs, seed=1), type)
    exact = linear(exact_backend(), x, weight)
    error = linear(int8_backend(), x, weight) - exact
    assert 0 < np.sqrt((error**2).mean()) < 0.007 * exact.std()


@pytest.mark.parametrize("num_rows", [3, 70])
def test_int8_bits_do_not_depend_on_what_the_inputs_come_from(num_rows: int) -> None:
    """Rounded with the norm or the activation before, or by the layer itself; one, then another."""
    x = normal(num_rows, 256)
    weights = {
        "norm": view_of(normal(1, 256, seed=1)),
        "up": noise(WeightType.Q4_1, 640, 256),
        "other": noise(WeightType.Q8_0, 640, 256),
        "down": noise(WeightType.Q4_1, 48, 320),
    }
    backend = int8_backend(threads=2)

    def chained(ops: Any, x: int, w: Any) -> Any:
        normed = ops.rms_norm(x, w["norm"], 1e-5)
        both = ops.add(ops.linear(normed, (w["up"],)), ops.linear(normed, (w["other"],)))
        return ops.linear(ops.silu_mul(both), (w["down"],))

    normed = apply(backend, lambda ops, x, w: ops.rms_norm(x, w["norm"], 1e-5), x, weights)
    both = linear(backend, normed, weights["up"]) + linear(backend, normed, weights["other"])
    gated = apply(backend, lambda ops, x, w: ops.silu_mul(x), both, {})
    expected = linear(backend, gated, weights["down"])
    assert apply(backend, chained, x, weights).tobytes() == expected.tobytes()


@pytest.mark.parametrize("backend", [exact_backend(), int8_backend(threads=2)], ids=["f32", "int8"])
@pytest.mark.parametrize("num_rows", [1, 7, 200])
@pytest.mark.parametrize("width", [320, 64, 48, 37])  # whole blocks, whole panels, and neither
def test_a_gate_is_the_same_with_its_weights_and_after_them(
    backend: NativeBackend, num_rows: int, width: int
) -> None:
    x = normal(num_rows, 256)
    weights = {
        "gate": noise(WeightType.Q4_1, width, 256),
        "up": noise_of(WeightType.Q8_0, width, 256, np.random.default_rng(5)),
        "down": noise(WeightType.Q4_1 if width % 32 == 0 else WeightType.F16, 48, width),
    }

    def hidden(ops: Any, x: int, w: Any) -> Any:
        return ops.silu_mul(ops.linear(x, (w["gate"], w["up"])))

    def read_twice(ops: Any, x: int, w: Any) -> Any:
        gated = hidden(ops, x, w)
        return ops.linear(ops.add(gated, gated), (w["down"],))

    both = apply(backend, lambda ops, x, w: ops.linear(x, (w["gate"], w["up"])), x, weights)
    gated = apply(backend, lambda ops, x, w: ops.silu_mul(x), both, {})
    assert apply(backend, hidden, x, weights).tobytes() == gated.tobytes()
    down = apply(backend, lambda ops, x, w: ops.linear(hidden(ops, x, w), (w["down"],)), x, weights)
    assert down.tobytes() == linear(backend, gated, weights["down"]).tobytes()
    twice = apply(backend, read_twice, x, weights)
    assert twice.tobytes() == linear(backend, gated + gated, weights["down"]).tobytes()


@pytest.mark.parametrize("type", INT8_TYPES)
def test_int8_bits_do_not_depend_on_rows_threads_or_instruction_set(type: WeightType) -> None:
    inputs = whole_blocks(type, 288)
    x, weight = normal(40, inputs), noise(type, 200, inputs)
    together = linear(int8_backend(), x, weight)
    for count in range(1, 40):
        assert (linear(int8_backend(), x[:count], weight) == together[:count]).all(), count
    results = {linear(int8_backend(isa, n), x, weight).tobytes() for isa in ISAS for n in (1, 2, 5)}
    assert results == {together.tobytes()}


@pytest.mark.parametrize("type", INT8_TYPES)
def test_int8_bits_of_many_rows_and_inputs(type: WeightType) -> None:
    """Heights at which rows are cut into tiles in other ways, and more inputs than are decoded at
    a time."""
    inputs = whole_blocks(type, 2080)
    x, weight = normal(200, inputs), noise(type, 37, inputs)
    expected = linear(int8_backend("portable"), x, weight)
    for isa in ISAS:
        for count in (9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 191, 192, 193, 200):
            out = linear(int8_backend(isa), x[:count], weight)
            assert out.tobytes() == expected[:count].tobytes(), (isa, count)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", INT8_TYPES)
@pytest.mark.parametrize("num_rows", [6, 18])
def test_int8_at_the_ends_of_its_range(isa: str, type: WeightType, num_rows: int) -> None:
    """The greatest products that there are, in every lane, and blocks of nothing."""
    block = BLOCKS[type]
    x = np.ones((num_rows, 3 * block.num_values), np.float32)
    x[1], x[2], x[3, 40:70], x[4] = -1, 1e-38, 0, 3e38
    # All bits set, then none: q at both ends. Q8_0 has -128, which no quantiser writes.
    for fill in (0x80,) if type is WeightType.Q8_0 else (0xFF, 0x00):
        raw = np.full((16 * 3, block.num_bytes), fill, np.uint8)
        for _, _, first, end in block.floats:
            raw[:, first:end] = np.array([1.0], np.float16).view(np.uint8)
        if type in (WeightType.Q4_K, WeightType.Q5_K):
            raw[:, 3] |= 0x80  # the minimum is subtracted, and infinity minus infinity no number
            raw[:, 4:16] = 0xFF
        if type is WeightType.Q6_K:
            raw[:, 192:208] = 0x80  # the factor with the greatest magnitude
        if type in (WeightType.Q4_G32, WeightType.Q4_G128):
            raw[:, 2:4] = groups.offsets([0 if fill else 15])
        weight = TensorView("w", type, 16, x.shape[1], memoryview(raw.tobytes()))
        out = linear(int8_backend(isa), x, weight)
        exact = x.astype(np.float64) @ values_of(weight).T
        exact[2] = 0.0  # too small to have a scale
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(out, exact.astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", INT8_TYPES)
@pytest.mark.parametrize("q", [-32, 31])
def test_int8_sums_fit_where_signs_agree(isa: str, type: WeightType, q: int) -> None:
    """Inputs of one sign in each half of a block, of the other in the other half, and of both in
    turns: every partial sum at its end, whatever the order of the products.
    """
    cols = whole_blocks(type, 256)
    weight = view_of(np.full((17, cols), q, np.float32), type)
    halves = np.repeat(np.tile([1.0, -1.0], cols // 32), 16)
    bytes_, quads = np.repeat(np.tile([1.0, -1.0], cols // 16), 8), np.tile([1.0, -1.0], cols // 2)
    x = np.stack([np.ones(cols), -np.ones(cols), halves, -halves, bytes_, quads]).astype(np.float32)
    x = np.tile(x, (3, 1))  # enough rows for tiles
    exact = x.astype(np.float64) @ values_of(weight).T
    out = linear(int8_backend(isa), x, weight)
    np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-6 * cols * abs(q))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_int8_hides_nothing_that_is_no_number(isa: str, broken: float) -> None:
    weight = view_of(normal(16, 96, seed=1), WeightType.Q4_1)
    for num_rows in (3, 20):
        x = normal(num_rows, 96)
        x[1, 50] = broken
        with np.errstate(all="ignore"):
            out = linear(int8_backend(isa), x, weight)
        assert np.isnan(out[1]).all()
        assert np.isfinite(np.delete(out, 1, axis=0)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["f32", "int8"])
@pytest.mark.parametrize("type", [WeightType.Q4_G32, WeightType.Q4_G128])
def test_offsets_in_the_middle_give_the_bits_of_q4_0(
    type: WeightType, activations: str, isa: str
) -> None:
    x, backend = normal(9, 256), NativeBackend(threads=1, isa=isa, activations=activations)
    blocks = np.frombuffer(noise(WeightType.Q4_0, 33, 256).data, np.uint8).copy()
    runs = blocks.reshape(-1, BLOCKS[type].num_values // 32, 18)
    runs[:, :, :2] = runs[:, :1, :2]  # one scale for each group
    nibbles = runs[:, :, 2:].reshape(len(runs), -1)
    parts = [runs[:, 0, :2], groups.offsets(np.full(len(runs), 8)), nibbles]
    view = TensorView("w", type, 33, 256, memoryview(np.hstack(parts).tobytes()))
    known = TensorView("w", WeightType.Q4_0, 33, 256, memoryview(blocks.tobytes()))
    assert (linear(backend, x, view) == linear(backend, x, known)).all()


@pytest.mark.parametrize("type", [WeightType.F32, WeightType.F16])
def test_int8_is_for_quantised_weights(type: WeightType) -> None:
    x, weight = normal(3, 96), view_of(normal(16, 96, seed=1), type)
    assert (linear(int8_backend(), x, weight) == linear(exact_backend(), x, weight)).all()


def test_weights_of_several_types_in_one_operation() -> None:
    x = normal(5, 256)
    views = {type.value: view_of(normal(19, 256, seed=1), type) for type in WeightType}
    together = apply(
        int8_backend(), lambda ops, x, w: ops.linear(x, tuple(w[name] for name in views)), x, views
    )
    apart = [linear(int8_backend(), x, view) for view in views.values()]
    assert (together == np.hstack(apart)).all()
