"""The same bits on every instruction set, with any number of threads and rows; close to float64."""

from typing import Any

import numpy as np
import pytest

from headrace.ops.interface import AttentionSpec, KvLayout, Rope, WeightType
from headrace.ops.native import _native
from headrace.ops.native.backend import NativeBackend
from support.ops_rig import (
    apply,
    batch_of,
    compile_rows,
    linear,
    noise,
    normal,
    run,
    values_of,
    view_of,
    whole_blocks,
)

ISAS = _native.usable_isas()
needs_two = pytest.mark.skipif(len(ISAS) < 2, reason="this CPU has one instruction set only")


def backend_of(isa: str = "auto", threads: int = 1) -> NativeBackend:
    return NativeBackend(threads=threads, isa=isa, activations="f32")


@needs_two
@pytest.mark.parametrize("type", list(WeightType))
@pytest.mark.parametrize("inputs", [32, 288, 544])
def test_linear_on_every_instruction_set(type: WeightType, inputs: int) -> None:
    inputs = whole_blocks(type, inputs)
    x, weight = normal(40, inputs), noise(type, 37, inputs)
    with np.errstate(all="ignore"):
        assert len({linear(backend_of(isa), x, weight).tobytes() for isa in ISAS}) == 1


@pytest.mark.parametrize("type", list(WeightType))
def test_a_row_alone_and_among_any_number(type: WeightType) -> None:
    inputs = whole_blocks(type, 288)
    x, weight = normal(40, inputs), view_of(normal(37, inputs, seed=1), type)
    together = linear(backend_of(), x, weight)
    for count in range(1, 40):
        assert (linear(backend_of(), x[:count], weight) == together[:count]).all(), count


@pytest.mark.parametrize("inputs", [1, 7, 8, 9, 15, 257, 300])
@pytest.mark.parametrize("type", [WeightType.F32, WeightType.F16, WeightType.BF16])
@pytest.mark.parametrize("num_rows", [3, 30])
def test_float_weights_of_any_width(type: WeightType, inputs: int, num_rows: int) -> None:
    x, weight = normal(num_rows, inputs), view_of(normal(19, inputs, seed=1), type)
    exact = x.astype(np.float64) @ values_of(weight).T
    np.testing.assert_allclose(linear(backend_of(), x, weight), exact, rtol=0, atol=1e-3)


def test_linear_is_one_chain_of_fused_multiply_adds() -> None:
    x, weight = normal(2, 70), view_of(normal(3, 70, seed=1))
    exact_weight = values_of(weight)
    expected = np.zeros((2, 3), np.float32)
    for k in range(70):
        # A product of two floats fits a double. The sum is rounded twice here, to double and to
        # float, which the fused operation does not; over these values that makes no difference.
        products = x[:, None, k].astype(np.float64) * exact_weight[None, :, k]
        expected = (products + expected).astype(np.float32)
    assert linear(backend_of(), x, weight).tobytes() == expected.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_more_threads_change_nothing(isa: str) -> None:
    x, weight = normal(23, 320), view_of(normal(700, 320, seed=1), WeightType.Q4_1)
    results = {linear(backend_of(isa, threads), x, weight).tobytes() for threads in (1, 2, 5)}
    assert len(results) == 1


# ---- registers


def test_a_register_read_late_is_not_overwritten() -> None:
    """`x` is used at the end again, after enough operations to pass its buffer on."""
    x = normal(5, 32)
    eye = view_of(np.eye(32, dtype=np.float32))

    def body(ops: Any, x: Any, w: Any) -> Any:
        y = x
        for _ in range(6):
            y = ops.linear(y, (w["eye"],))
        return ops.add(x, ops.add(y, x))

    assert (apply(backend_of(), body, x, {"eye": eye}) == x + (x + x)).all()


def test_a_sum_and_its_norm_are_both_right() -> None:
    """`add` and `rms_norm` run as one; the sum stays readable."""
    x = normal(5, 48)
    weight = view_of(normal(1, 48, seed=1))

    def body(ops: Any, x: Any, w: Any) -> Any:
        total = ops.add(x, x)
        return ops.add(ops.rms_norm(total, w["w"], 1e-5), total)

    twice = 2 * x.astype(np.float64)
    normed = twice / np.sqrt((twice**2).mean(-1, keepdims=True) + 1e-5) * values_of(weight)
    out = apply(backend_of(), body, x, {"w": weight})
    np.testing.assert_allclose(out, normed + twice, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wanted", [[], [0], [19], [2, 3, 11], list(range(20))])
def test_rows_that_nobody_wants_change_nothing(wanted: list[int]) -> None:
    """Rows are dropped before the last operations, but keys and values of all are kept."""
    spec = AttentionSpec(2, 1, 16, 0.25)
    rope = Rope((1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003), False)
    weights = {
        "qkv": view_of(normal(64, 32, seed=1)),
        "out": view_of(normal(32, 32, seed=2)),
        "up": view_of(normal(64, 32, seed=3)),
        "norm": view_of(normal(1, 32, seed=4)),
    }

    def body(ops: Any, x: Any, w: Any) -> Any:
        attended = ops.attention(ops.linear(x, (w["qkv"],)), 0, spec, rope)
        early = ops.add(x, ops.linear(attended, (w["out"],)))
        x = ops.add(early, ops.silu_mul(ops.linear(early, (w["up"],))))
        attended = ops.attention(ops.linear(x, (w["qkv"],)), 1, spec, rope)
        x = ops.add(x, ops.linear(attended, (w["out"],)))
        normed = ops.rms_norm(x, w["norm"], 1e-5)
        return ops.add(ops.add(early, x), ops.silu_mul(ops.linear(normed, (w["up"],))))

    program = compile_rows(
        backend_of(threads=2), body, normal(21, 32), weights, kv=KvLayout(2, 1, 16, 4)
    )
    everything = run(program, batch_of((range(20), 0, [0, 1])))
    following = run(program, batch_of(([20], 20, [0, 1])))
    some = run(program, batch_of((range(20), 0, [2, 3]), logit_rows=wanted))
    assert some.tobytes() == everything[wanted].tobytes()
    assert run(program, batch_of(([20], 20, [2, 3]))).tobytes() == following.tobytes()
