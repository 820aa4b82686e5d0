"""Weights as float32 tensors, from each storage type's own layout.

A GGUF block holds 32 values along a row: Q4_0 = f16 scale, 16 bytes of nibbles (value - 8); Q4_1 =
f16 scale, f16 minimum, 16 bytes of nibbles; Q8_0 = f16 scale, 32 int8. Byte i of the nibbles holds
value i in its low half and value i + 16 in its high half.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.core.base.errors import DeviceError
from headrace.ops.interface import TensorView, WeightType

BLOCK = 32


def dequantise(view: TensorView, device: str) -> Tensor:
    """[rows, cols] float32, exactly what the type defines. Raises DeviceError where the bytes are
    not as many as the type and shape take.
    """
    num_values, num_bytes = _BLOCKS[view.type]
    blocks_per_row, rest = divmod(view.cols, num_values)
    if rest or len(view.data) != view.rows * blocks_per_row * num_bytes:
        raise DeviceError(
            f"{view.name} is not {view.rows} x {view.cols} of {view.type}", num_bytes=len(view.data)
        )
    # A copy: the view may be read-only, and need not outlive the call.
    raw = torch.frombuffer(bytearray(view.data), dtype=torch.uint8).to(device)
    return _DECODERS[view.type](raw).reshape(view.rows, view.cols)


def _half(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 0xF, packed >> 4), dim=-1).float()


def _q4_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 2 + BLOCK // 2)
    return (_nibbles(blocks[:, 2:]) - 8) * _half(blocks[:, :2])


def _q4_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 4 + BLOCK // 2)
    # A product of 11 by 4 bits is exact: there is one rounding, as with a fused multiply-add.
    return _nibbles(blocks[:, 4:]) * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _q8_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 2 + BLOCK)
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks[:, :2])


# Values and bytes of the smallest whole piece of a row.
_BLOCKS: dict[WeightType, tuple[int, int]] = {
    WeightType.F32: (1, 4),
    WeightType.F16: (1, 2),
    WeightType.BF16: (1, 2),
    WeightType.Q4_0: (BLOCK, 2 + BLOCK // 2),
    WeightType.Q4_1: (BLOCK, 4 + BLOCK // 2),
    WeightType.Q8_0: (BLOCK, 2 + BLOCK),
}

_DECODERS: dict[WeightType, Callable[[Tensor], Tensor]] = {
    WeightType.F32: lambda raw: raw.view(torch.float32).clone(),
    WeightType.F16: _half,
    WeightType.BF16: lambda raw: raw.view(torch.bfloat16).float(),
    WeightType.Q4_0: _q4_0,
    WeightType.Q4_1: _q4_1,
    WeightType.Q8_0: _q8_0,
}
