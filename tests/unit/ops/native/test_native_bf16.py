"""Linear layers in bf16: the bits of their definition in numpy, on every instruction set."""

from typing import Any

import numpy as np
import pytest

from headrace.ops.interface import TensorView, WeightType
from headrace.ops.native import _native
from headrace.ops.native.backend import NativeBackend
from support.ops_rig import (
    apply,
    noise_of,
    normal,
    to_bf16,
    values_of,
    view_of,
)

ISAS = _native.usable_isas()
SHARED_ISAS = [isa for isa in ISAS if _native.bf16_products(isa) != "dot"]
LEAST = 2.0**-126  # normal number


def bf16_backend(isa: str = "auto", threads: int = 1) -> NativeBackend:
    return NativeBackend(threads=threads, isa=isa, activations="bf16")


def linear(backend: NativeBackend, x: Any, weight: TensorView, bias: Any = None) -> Any:
    weights = {"w": weight} if bias is None else {"w": weight, "b": view_of(bias[None])}
    biases = ("b",) if "b" in weights else ()
    return apply(
        backend,
        lambda ops, x, w: ops.linear(x, (w["w"],), tuple(w[name] for name in biases)),
        x,
        weights,
    )


def flushed(x: Any) -> Any:
    """With zeros, of their sign, for numbers too small to be normal."""
    return np.where(np.abs(x) < LEAST, np.copysign(np.float32(0), x), x).astype(np.float32)


def rounded_sum(a: Any, b: Any) -> Any:
    """a + b of float64, rounded once to float32; zero where that is below the normal numbers as if
    exponents had no end.
    """
    with np.errstate(all="ignore"):
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
        # To odd, so that the rounding to float32 is the only one that counts.
        bits = total.view(np.int64)
        away = np.where((error > 0) == (total > 0), 1, -1)
        bits += np.where((error != 0) & np.isfinite(error) & (bits & 1 == 0), away, 0)
        is_tiny = np.abs((total * 2.0**64).astype(np.float32)) < LEAST * 2.0**64
        return np.where(is_tiny, np.copysign(0.0, total), total).astype(np.float32)


def chain(x: Any, w: Any) -> Any:
    """[rows, outputs]: the fused multiply-adds over the inputs in order, from zero."""
    acc = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        with np.errstate(all="ignore"):
            product = x[:, None, k].astype(np.float64) * w[None, :, k].astype(np.float64)
        acc = rounded_sum(product, acc.astype(np.float64))
    return acc


def defined(x: Any, weight: TensorView, bias: Any = None) -> Any:
    """What `Kernels::linear_bf16` says."""
    padding = ((0, 0), (0, -x.shape[1] % 32))
    x = flushed(np.pad(to_bf16(x), padding))
    w = flushed(np.pad(values_of(weight).astype(np.float32), padding))
    acc = np.zeros((len(x), len(w)))
    for k in range(0, x.shape[1], 32):
        even, odd = (chain(x[:, k + i : k + 32 : 2], w[:, k + i : k + 32 : 2]) for i in (0, 1))
        both = rounded_sum(even.astype(np.float64), odd.astype(np.float64))
        acc = rounded_sum(acc, both.astype(np.float64)).astype(np.float64)
    if bias is not None:
        acc = rounded_sum(acc, np.broadcast_to(flushed(bias).astype(np.float64), acc.shape))
    return acc.astype(np.float32)


def alike(a: Any, b: Any) -> bool:
    """The same bits, whichever NaN is one."""
    nan = np.isnan(b)
    return bool((np.isnan(a) == nan).all()) and a[~nan].tobytes() == b[~nan].tobytes()


@pytest.mark.parametrize("isa", SHARED_ISAS)
@pytest.mark.parametrize("inputs", [1, 8, 31, 32, 33, 96, 301])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bits_are_those_of_the_definition(isa: str, inputs: int, has_bias: bool) -> None:
    x = normal(19, inputs) * np.exp(3 * normal(1, inputs, seed=3))
    weight = view_of(normal(37, inputs, seed=1), WeightType.BF16)
    bias = normal(37, seed=2) if has_bias else None
    expected = defined(x, weight, bias)
    for rows in (1, 2, 5, 19):
        out = linear(bf16_backend(isa), x[:rows], weight, bias)
        assert alike(out, expected[:rows]), rows


@pytest.mark.parametrize("isa", SHARED_ISAS)
@pytest.mark.parametrize("exponent", [-140, -126, -100, -70, 60])
def test_bits_where_numbers_leave_their_range(isa: str, exponent: int) -> None:
    """Products and sums around the least normal number and beyond the greatest one."""
    x = normal(17, 96) * np.float32(2.0) ** normal(17, 96, seed=5).round().astype(np.float32)
    rest = min(-127 - exponent, 0) if exponent < 0 else 66
    with np.errstate(all="ignore"):
        x = (x * 2.0**rest).astype(np.float32)
        weight = view_of(
            (normal(33, 96, seed=1) * 2.0**exponent).astype(np.float32), WeightType.BF16
        )
    expected = defined(x, weight)
    for rows in (1, 3, 17):
        assert alike(linear(bf16_backend(isa), x[:rows], weight), expected[:rows]), rows
    if exponent in (-70, -100):
        assert (expected == 0).any()
        assert (np.abs(expected[expected != 0]) < 100 * LEAST).any()


@pytest.mark.parametrize("isa", SHARED_ISAS)
def test_sums_that_round_up_to_the_least_normal_number(isa: str) -> None:
    """What is below it by half a place, or less, is not too small; x86 looks after rounding."""
    parts = np.arange(1, 17, dtype=np.float32) / 8
    x = np.zeros((16, 32), np.float32)
    x[:, 0], x[:, 2] = 2.0**-63, -parts * np.float32(2.0**-75)
    w = np.zeros((16, 32), np.float32)
    w[:, 0], w[:, 2] = 2.0**-63, 2.0**-75
    weight = view_of(w, WeightType.BF16)
    expected = defined(x, weight)
    assert set(expected[:4].ravel()) == {np.float32(LEAST)}
    assert not expected[4:].any()
    assert alike(linear(bf16_backend(isa), x, weight), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number_stays_in_its_row_and_output(isa: str) -> None:
    x, w = normal(40, 96), normal(37, 96, seed=1)
    x[1, 50], x[2, 3], x[39, 95] = np.inf, np.nan, -np.inf
    w[5, 7], w[36, 64] = np.nan, np.inf
    out = linear(bf16_backend(isa), x, view_of(w, WeightType.BF16))
    finite = np.ones_like(out, bool)
    finite[[1, 2, 39]] = False
    finite[:, [5, 36]] = False
    assert (np.isfinite(out) == finite).all()
    assert np.isnan(out[2]).all()
    assert np.isnan(out[:, 5]).all()
    assert (out[1, :5] == np.inf * np.sign(w[:5, 50])).all()


@pytest.mark.parametrize("isa", SHARED_ISAS)
def test_any_bits_of_a_weight(isa: str) -> None:
    """Subnormal, great and small numbers of both signs."""
    weight = noise_of(WeightType.BF16, 50, 96, np.random.default_rng(7))
    x = normal(18, 96)
    x[3, :40], x[4] = 1e-40, 0.0
    with np.errstate(all="ignore"):
        assert alike(linear(bf16_backend(isa), x, weight), defined(x, weight))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("inputs", [64, 301])
def test_bits_do_not_depend_on_rows_or_threads(isa: str, inputs: int) -> None:
    x, bias = normal(400, inputs), normal(200, seed=2)
    weight = view_of(normal(200, inputs, seed=1), WeightType.BF16)
    together = linear(bf16_backend(isa), x, weight, bias)
    for rows in (*range(1, 40), 63, 64, 65, 191, 192, 193, 399):
        assert (linear(bf16_backend(isa), x[:rows], weight, bias) == together[:rows]).all(), rows
    for threads in (2, 5):
        assert (linear(bf16_backend(isa, threads), x, weight, bias) == together).all()


def test_bits_do_not_depend_on_the_instruction_set() -> None:
    x = normal(193, 576)
    weight = view_of(normal(300, 576, seed=1), WeightType.BF16)
    results = {linear(bf16_backend(isa, 2), x, weight).tobytes() for isa in SHARED_ISAS}
    assert len(results) == 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("inputs", [32, 33, 301])
def test_sums_are_near_the_exact_ones(isa: str, inputs: int) -> None:
    x, weight = normal(31, inputs), view_of(normal(37, inputs, seed=1), WeightType.BF16)
    exact = to_bf16(x).astype(np.float64) @ values_of(weight).T
    np.testing.assert_allclose(linear(bf16_backend(isa), x, weight), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("isa", ISAS)
def test_the_mode_of_small_numbers_ends_with_the_products(isa: str) -> None:
    x, weight = normal(17, 32), view_of(normal(16, 32, seed=1), WeightType.BF16)
    linear(bf16_backend(isa), x, weight)
    tiny = np.full((3, 16), 1e-40, np.float32)
    backend = bf16_backend(isa)
    assert (apply(backend, lambda ops, x, w: ops.add(x, x), tiny, {}) == tiny + tiny).all()


@pytest.mark.parametrize("isa", ISAS)
def test_kv_comes_only_from_the_same_arithmetic(isa: str) -> None:
    of_kind = {"fma": ("", ""), "dot": (" bf16-dot", ""), "tiles": (" bf16", " attention-bf16")}
    weights, attention = of_kind[_native.bf16_products(isa)]
    assert NativeBackend(1, isa, "int8").arithmetic == f"native int8{weights}{attention}"
    assert NativeBackend(1, isa, "int12").arithmetic == f"native int12{weights}{attention}"
    fastest = "int12" if attention else "int8"
    assert NativeBackend(1, isa).arithmetic == NativeBackend(1, isa, fastest).arithmetic
    assert NativeBackend(1, isa, "f32").arithmetic == "native"
    told = NativeBackend(1, isa, "bf16", "bf16")
    assert told.arithmetic == f"native{weights or ' bf16'} attention-bf16"
