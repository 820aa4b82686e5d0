"""What the reference keeps and reports. What it computes is the conformance suite's business."""

from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.base.errors import DeviceError
from headrace.ops.interface import AttentionSpec, KvLayout, Rope, WeightType
from headrace.ops.torch.backend import TorchBackend, rotate
from support.ops_rig import attended, batch_of, compile_rows, run, view_of

ROWS = np.random.default_rng(0).standard_normal((12, 32)).astype(np.float32)


def test_weights_occupy_what_float32_takes() -> None:
    backend = TorchBackend()
    backend.load_weight(view_of(ROWS, WeightType.Q4_0))
    assert backend.weight_bytes() == 12 * 32 * 4
    backend.load_weight(view_of(ROWS[:1]))
    assert backend.weight_bytes() == 13 * 32 * 4


def test_it_does_not_claim_batch_invariance() -> None:
    assert not TorchBackend().batch_invariant


def test_a_pool_that_does_not_fit() -> None:
    with pytest.raises(DeviceError, match="fit"):
        compile_rows(
            TorchBackend(), lambda ops, x, w: x, ROWS, kv=KvLayout(1, 1, 32, num_blocks=2**44)
        )


def test_logits_stay_until_the_next_run() -> None:
    program = compile_rows(TorchBackend(), lambda ops, x, w: x, ROWS)
    assert program.logits() == []
    run(program, batch_of(([3, 4], 0, [0])))
    with pytest.raises(DeviceError):
        program.run(batch_of(([99], 0, [0])))
    assert np.array_equal(np.array(program.logits(), np.float32), ROWS[[3, 4]])


def test_keys_and_values_are_rounded_to_bfloat16() -> None:
    """Seen from outside: a value that bfloat16 does not have comes back as its neighbour."""
    rows = np.zeros((1, 6), np.float32)
    rows[0, 4:] = 1 + 2**-9
    spec, rope = AttentionSpec(1, 1, 2, 1.0), Rope((1.0,), True)
    program = compile_rows(TorchBackend(), lambda ops, x, w: ops.attention(x, 0, spec, rope), rows)
    assert run(program, batch_of(([0], 0, [0]))).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("interleaved", "expected"),
    [(True, [0.0, 1.0, 0.0, 0.0]), (False, [0.0, 0.0, 1.0, 0.0])],
)
def test_a_quarter_turn(interleaved: bool, expected: list[float]) -> None:
    rope = Rope((torch.pi / 2, 0.0), interleaved)
    x = torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])
    turned = rotate(x, torch.tensor([1]), rope)[0, 0]
    assert turned.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_computes_the_same() -> None:
    rows = np.random.default_rng(1).standard_normal((40, 8 * 16)).astype(np.float32)
    spec, rope = AttentionSpec(4, 2, 16, 0.25), Rope(tuple(0.5**i for i in range(8)), False)

    def out(device: str) -> Any:
        backend = TorchBackend(device)
        program = compile_rows(
            backend,
            lambda ops, x, w: ops.attention(x, 0, spec, rope),
            rows,
            kv=KvLayout(1, 2, 16, 8),
        )
        return run(program, batch_of((range(40), 0, [3, 1, 5])))

    # As between any two backends: a key's bf16 rounding may fall the other way.
    np.testing.assert_allclose(out("cuda"), out("cpu"), rtol=0, atol=8e-3)
    np.testing.assert_allclose(out("cuda"), attended(rows, spec, rope), rtol=0, atol=8e-3)
