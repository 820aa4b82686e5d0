"""Weights as float32 tensors, from each storage type's own layout.

A GGUF block holds 32 values along a row: Q4_0 = f16 scale, 16 bytes of nibbles (value - 8); Q4_1 =
f16 scale, f16 minimum, 16 bytes of nibbles; Q8_0 = f16 scale, 32 int8. Byte i of the nibbles holds
value i in its low half and value i + 16 in its high half. Q5_0 (value - 16) and Q5_1 have a word
before the nibbles, whose bit i is the fifth of value i. Q4_G32 and Q4_G128 are defined with
`WeightType`.

A block of a K type holds 256 values:

- Q4_K: f16 scale, f16 minimum, 12 bytes with eight 6-bit factors of each, one for every 32 values,
  128 bytes of nibbles: of every 64 values, the first 32 in the low halves of 32 bytes and the rest
  in the high halves. A value is scale * factor * nibble - minimum * its factor.
- Q5_K: the same with 32 bytes before the nibbles; bit j of byte i is the fifth of value 32 j + i.
- Q6_K: for both halves of the values 64 bytes of nibbles, in whose low halves are their first 64;
  for both halves 32 bytes, in bits 2 j of byte i the upper two of value 32 j + i; 16 int8 factors,
  one for every 16 values; f16 scale. A value is scale * factor * (q - 32).

No step rounds but the last: a product of a scale, a factor and a value fits float32.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headrace.core.base.errors import DeviceError
from headrace.ops.interface import TensorView, WeightType

BLOCK = 32
K_BLOCK = 256


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
    # The product is exact: there is one rounding, as with a fused multiply-add.
    return _nibbles(blocks[:, 4:]) * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _fives(words: Tensor, packed: Tensor) -> Tensor:
    fifth = words.unsqueeze(-1) >> torch.arange(8, device=words.device) & 1
    return _nibbles(packed) + 16.0 * fifth.flatten(1)


def _q5_0(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 6 + BLOCK // 2)
    return (_fives(blocks[:, 2:6], blocks[:, 6:]) - 16) * _half(blocks[:, :2])


def _q5_1(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 8 + BLOCK // 2)
    values = _fives(blocks[:, 4:8], blocks[:, 8:])
    return values * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _k_affine(blocks: Tensor, values: Tensor) -> Tensor:
    """Of Q4_K and Q5_K blocks and their values [N, 8, 32]."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    # The last four factors of both share a byte; their upper two bits are above the first four.
    scale_factors = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), -1).float()
    min_factors = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), -1).float()
    scales = _half(blocks[:, :2]) * scale_factors
    minima = _half(blocks[:, 2:4]) * min_factors
    return values * scales.unsqueeze(-1) - minima.unsqueeze(-1)


def _q4_k(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 16 + K_BLOCK // 2)
    return _k_affine(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 48 + K_BLOCK // 2)
    fifth = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, device=raw.device).view(8, 1) & 1
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return _k_affine(blocks, low + 16.0 * fifth)


def _q6_k(raw: Tensor) -> Tensor:
    blocks = raw.view(-1, 210)
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, device=raw.device).view(4, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    values = (low + 16.0 * high - 32).view(-1, 16, 16)
    factors = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return values * (_half(blocks[:, 208:]) * factors).unsqueeze(-1)


def _q4_grouped(raw: Tensor, size: int) -> Tensor:
    blocks = raw.view(-1, 4 + size // 2)
    values = _nibbles(blocks[:, 4:].reshape(-1, BLOCK // 2)).view(-1, size)
    return (values + _half(blocks[:, 2:4])) * _half(blocks[:, :2])


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
    WeightType.Q5_0: (BLOCK, 6 + BLOCK // 2),
    WeightType.Q5_1: (BLOCK, 8 + BLOCK // 2),
    WeightType.Q8_0: (BLOCK, 2 + BLOCK),
    WeightType.Q4_G32: (BLOCK, 4 + BLOCK // 2),
    WeightType.Q4_G128: (128, 4 + 128 // 2),
    WeightType.Q4_K: (K_BLOCK, 144),
    WeightType.Q5_K: (K_BLOCK, 176),
    WeightType.Q6_K: (K_BLOCK, 210),
}

_DECODERS: dict[WeightType, Callable[[Tensor], Tensor]] = {
    WeightType.F32: lambda raw: raw.view(torch.float32).clone(),
    WeightType.F16: _half,
    WeightType.BF16: lambda raw: raw.view(torch.bfloat16).float(),
    WeightType.Q4_0: _q4_0,
    WeightType.Q4_1: _q4_1,
    WeightType.Q5_0: _q5_0,
    WeightType.Q5_1: _q5_1,
    WeightType.Q8_0: _q8_0,
    WeightType.Q4_G32: partial(_q4_grouped, size=BLOCK),
    WeightType.Q4_G128: partial(_q4_grouped, size=128),
    WeightType.Q4_K: _q4_k,
    WeightType.Q5_K: _q5_k,
    WeightType.Q6_K: _q6_k,
}
