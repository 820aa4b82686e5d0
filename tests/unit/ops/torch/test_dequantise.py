"""Blocks written by hand, value by value. Random ones are the conformance suite's."""

import struct

import pytest

from headrace.core.base.errors import DeviceError
from headrace.ops.interface import TensorView, WeightType
from headrace.ops.torch.dequantise import dequantise

# Byte i of the nibbles is 0x(15 - i)(i): value i is i, value 16 + i is 15 - i.
NIBBLES = bytes((15 - i) << 4 | i for i in range(16))
UP_AND_DOWN = [*range(16), *range(15, -1, -1)]


def values(type: WeightType, data: bytes, *, rows: int = 1, cols: int) -> list[list[float]]:
    found: list[list[float]] = dequantise(
        TensorView("w", type, rows, cols, memoryview(data)), "cpu"
    ).tolist()
    return found


def test_q4_0_is_centred_on_eight() -> None:
    data = struct.pack("<e", -0.5) + NIBBLES
    assert values(WeightType.Q4_0, data, cols=32) == [[-0.5 * (q - 8) for q in UP_AND_DOWN]]


def test_q4_1_has_a_minimum() -> None:
    data = struct.pack("<ee", 0.25, -3.0) + NIBBLES
    assert values(WeightType.Q4_1, data, cols=32) == [[0.25 * q - 3 for q in UP_AND_DOWN]]


def test_q8_0_is_signed() -> None:
    ints = [-128, -1, 0, 1, 127, *range(27)]
    data = struct.pack("<e32b", 2.0**-24, *ints)
    assert values(WeightType.Q8_0, data, cols=32) == [[2.0**-24 * q for q in ints]]


def test_blocks_go_along_rows() -> None:
    data = b"".join(struct.pack("<e32b", scale, *[1] * 32) for scale in (1.0, 2.0, 3.0, 4.0))
    assert values(WeightType.Q8_0, data, rows=2, cols=64) == [
        [1.0] * 32 + [2.0] * 32,
        [3.0] * 32 + [4.0] * 32,
    ]


def test_plain_types() -> None:
    numbers = [1.5, -0.0, 2.0**-14, 65504.0]
    assert values(WeightType.F32, struct.pack("<4f", *numbers), rows=2, cols=2) == [
        numbers[:2],
        numbers[2:],
    ]
    assert values(WeightType.F16, struct.pack("<4e", *numbers), cols=4) == [numbers]
    # The upper halves of 1.0, -2.0 and the largest finite float32 but for its low bits.
    assert values(WeightType.BF16, struct.pack("<3H", 0x3F80, 0xC000, 0x7F7F), cols=3) == [
        [1.0, -2.0, 3.3895313892515355e38]
    ]


def test_a_weight_outlives_its_view() -> None:
    data = bytearray(struct.pack("<2f", 1.0, 2.0))
    weight = dequantise(TensorView("w", WeightType.F32, 1, 2, memoryview(data)), "cpu")
    data[:] = bytes(8)
    assert weight.tolist() == [[1.0, 2.0]]


def test_an_error_names_the_weight() -> None:
    view = TensorView("blk.0.attn_q", WeightType.Q8_0, 1, 33, memoryview(bytes(34)))
    with pytest.raises(DeviceError, match=r"blk\.0\.attn_q is not 1 x 33 of q8_0"):
        dequantise(view, "cpu")
