"""The GGUF K types: blocks of 256 values, with scales that are a float16 times small integers.

Read in float64, value by value as the format defines them; written by the plainest rounding.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.ops.interface import WeightType

Bytes = NDArray[np.uint8]
Doubles = NDArray[np.float64]

_TINY = 1e-30


def values_of(blocks: Bytes, type: WeightType) -> Doubles:
    """Of blocks [N, bytes] the values [N, 256], exactly."""
    if type is WeightType.Q6_K:
        values = np.stack([_q6(blocks, n) for n in range(256)], -1).astype(float) - 32
        factors = blocks[:, 192:208].view(np.int8).astype(float)
        return np.asarray(values * np.repeat(_half(blocks, 208) * factors, 16, -1), float)
    values = np.stack([_q4_or_5(blocks, n, type) for n in range(256)], -1).astype(float)
    packed = blocks[:, 4:16].astype(int)
    factors, min_factors = np.zeros((2, len(blocks), 8))
    for i in range(4):
        first, second, rest = packed[:, i], packed[:, i + 4], packed[:, i + 8]
        factors[:, i], min_factors[:, i] = first % 64, second % 64
        factors[:, i + 4] = rest % 16 + first // 64 * 16
        min_factors[:, i + 4] = rest // 16 + second // 64 * 16
    scales, minima = _half(blocks, 0) * factors, _half(blocks, 2) * min_factors
    return values * np.repeat(scales, 32, -1) - np.repeat(minima, 32, -1)


def quantise(values: NDArray[Any], type: WeightType) -> Bytes:
    """Values [rows, cols] as blocks [N, bytes]."""
    x = values.astype(float).reshape(-1, 256)
    return _write_q6(x) if type is WeightType.Q6_K else _write_q4_or_5(x, type)


def _half(blocks: Bytes, first: int) -> Doubles:
    return np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16).astype(float)


def _q4_or_5(blocks: Bytes, n: int, type: WeightType) -> Any:
    nth, i = divmod(n, 32)
    low = blocks[:, (48 if type is WeightType.Q5_K else 16) + nth // 2 * 32 + i] >> nth % 2 * 4 & 15
    fifth = blocks[:, 16 + i] >> nth & 1 if type is WeightType.Q5_K else 0
    return low + 16 * fifth


def _q6(blocks: Bytes, n: int) -> Any:
    half, rest = divmod(n, 128)
    low = blocks[:, 64 * half + rest % 64] >> rest // 64 * 4 & 15
    return low + 16 * (blocks[:, 128 + 32 * half + rest % 32] >> rest // 32 * 2 & 3)


def _write_q4_or_5(x: Doubles, type: WeightType) -> Bytes:
    levels = 31 if type is WeightType.Q5_K else 15
    parts = x.reshape(-1, 8, 32)
    minima = np.maximum(-parts.min(-1), 0)
    scales = np.maximum(parts.max(-1) + minima, _TINY) / levels
    scale, scale_factors = _factors(scales)
    min_, min_factors = _factors(minima)
    steps = np.maximum(scale * scale_factors, _TINY)[..., None]
    q = np.rint((parts + (min_ * min_factors)[..., None]) / steps).clip(0, levels).astype(np.uint8)
    s, m = scale_factors.astype(np.uint8), min_factors.astype(np.uint8)
    out: list[Any] = [_bytes(scale), _bytes(min_)]
    out += [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6]
    out.append(s[:, 4:] & 15 | m[:, 4:] << 4)
    if type is WeightType.Q5_K:
        out.append(np.packbits(q >> 4, axis=1, bitorder="little")[:, 0])
    out.append((q[:, ::2] & 15 | q[:, 1::2] << 4).reshape(-1, 128))
    return np.hstack(out)


def _write_q6(x: Doubles) -> Bytes:
    parts = x.reshape(-1, 16, 16)
    scales = np.maximum(np.abs(parts).max(-1), _TINY) / 31
    scale = (scales.max(-1, keepdims=True) / 127).astype(np.float16).astype(float)
    factors = np.rint(scales / np.maximum(scale, _TINY)).clip(1, 127)
    steps = np.maximum(scale * factors, _TINY)[..., None]
    q = (np.rint(parts / steps).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15 | q[:, :, 2:] << 4).reshape(-1, 128)
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    return np.hstack([low, high.reshape(-1, 64), factors.astype(np.uint8), _bytes(scale)])


def _factors(scales: Doubles) -> tuple[Doubles, Doubles]:
    """A float16 [N, 1] and integers below 64 [N, 8] with about these products."""
    whole = (scales.max(-1, keepdims=True) / 63).astype(np.float16).astype(float)
    return whole, np.rint(scales / np.maximum(whole, _TINY)).clip(0, 63)


def _bytes(floats: Doubles) -> Bytes:
    return floats.astype(np.float16).view(np.uint8).reshape(len(floats), 2)
