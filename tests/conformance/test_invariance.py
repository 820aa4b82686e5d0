"""A small model's worth of operations: the same bits alone, together, in one thread or two."""

from typing import Any

import numpy as np
import pytest

from conformance.conftest import NATIVE, make_backend
from headrace.ops.interface import AttentionSpec, KvLayout, Rope, WeightType
from support.ops_rig import batch_of, compile_rows, run, view_of

SPEC = AttentionSpec(3, 1, 32, 32**-0.5)
ROPE = Rope(tuple(1.0 / (i + 1) for i in range(16)), False)
HIDDEN, WIDTH = 96, 256


def layer(ops: Any, x: Any, w: Any) -> Any:
    normed = ops.rms_norm(x, w["norm"], 1e-5)
    qkv = ops.linear(normed, (w["q"], w["k"], w["v"]))
    x = ops.add(x, ops.linear(ops.attention(qkv, 0, SPEC, ROPE), (w["o"],)))
    normed = ops.rms_norm(x, w["norm"], 1e-5)
    x = ops.add(x, ops.linear(ops.silu_mul(ops.linear(normed, (w["gate"], w["up"]))), (w["down"],)))
    return ops.linear(x, (w["head"],))


def program_of(backend: Any) -> Any:
    rng = np.random.default_rng(3)

    def weight(rows: int, cols: int, type: WeightType) -> Any:
        return view_of((rng.standard_normal((rows, cols)) * cols**-0.5).astype(np.float32), type)

    weights = {
        "norm": weight(1, HIDDEN, WeightType.F32),
        "q": weight(96, HIDDEN, WeightType.Q4_1),
        "k": weight(32, HIDDEN, WeightType.Q5_1),
        "v": weight(32, HIDDEN, WeightType.Q4_0),
        "o": weight(HIDDEN, 96, WeightType.BF16),
        "gate": weight(WIDTH, HIDDEN, WeightType.Q4_1),
        "up": weight(WIDTH, HIDDEN, WeightType.F16),
        "down": weight(HIDDEN, WIDTH, WeightType.Q6_K),
        "head": weight(501, HIDDEN, WeightType.Q8_0),
    }
    rows = rng.standard_normal((80, HIDDEN)).astype(np.float32)
    return compile_rows(backend, layer, rows, weights, KvLayout(1, 1, 32, 32))


def whole(backend: Any) -> bytes:
    return run(program_of(backend), batch_of((range(50), 0, range(4)))).tobytes()


def test_rows_alone_and_together(invariant_backend: Any) -> None:
    expected = whole(invariant_backend)
    program = program_of(invariant_backend)
    parts = []
    for start, end in ((0, 1), (1, 4), (4, 10), (10, 11), (11, 40), (40, 50)):
        # Between two strangers, at every alignment.
        out = run(
            program,
            batch_of(
                (range(50, 50 + start % 7 + 1), 0, [20]),
                (range(start, end), start, range(4)),
                (range(60, 80), 0, [21, 22]),
            ),
        )
        first = start % 7 + 1
        parts.append(out[first : first + end - start])
    assert np.concatenate(parts).tobytes() == expected


@pytest.mark.parametrize("name", NATIVE)
def test_one_thread_and_two(name: str) -> None:
    assert whole(make_backend(name, threads=1)) == whole(make_backend(name, threads=2))


@pytest.mark.skipif(len(NATIVE) < 2, reason="this CPU has one instruction set only")
def test_every_instruction_set() -> None:
    assert len({whole(make_backend(name)) for name in NATIVE}) == 1


@pytest.mark.parametrize("name", NATIVE)
def test_native_and_torch_agree(name: str) -> None:
    batch = batch_of((range(50), 0, range(4)))
    native = run(program_of(make_backend(name)), batch)
    torch = run(program_of(make_backend("torch")), batch)
    # Two layers of float32 dot products of length <= 160, and bf16 keys and values between them.
    np.testing.assert_allclose(native, torch, rtol=0, atol=2e-2)
    assert np.abs(native - torch).mean() < 5e-4
