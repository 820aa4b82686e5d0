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


def test_q5_0_is_centred_on_sixteen() -> None:
    fifths = 1 << 1 | 1 << 18 | 1 << 31  # of values 1, 18 and 31, whose nibbles are 1, 13 and 0
    data = struct.pack("<eI", 2.0, fifths) + NIBBLES
    expected = [2.0 * (q - 16) for q in UP_AND_DOWN]
    for i in (1, 18, 31):
        expected[i] += 32.0
    assert values(WeightType.Q5_0, data, cols=32) == [expected]


def test_q5_1_has_a_minimum() -> None:
    data = struct.pack("<eeI", 0.25, -3.0, 1 << 2 | 1 << 24) + NIBBLES
    expected = [0.25 * q - 3 for q in UP_AND_DOWN]
    expected[2] += 4.0
    expected[24] += 4.0
    assert values(WeightType.Q5_1, data, cols=32) == [expected]


# Factors 1, 2, 3, 63 and then 17, 32, 63, 0 of the scale; 5, 0, 1, 2 and then 48, 3, 15, 63 of the
# minimum. Of the last four of both, the low bits share the last bytes; the upper two lie above the
# first four.
SCALE_FACTORS, MIN_FACTORS = [1, 2, 3, 63, 17, 32, 63, 0], [5, 0, 1, 2, 48, 3, 15, 63]
FACTORS = bytes([
    0b01_000001, 0b10_000010, 0b11_000011, 0b00_111111,
    0b11_000101, 0b00_000000, 0b00_000001, 0b11_000010,
    0b0000_0001, 0b0011_0000, 0b1111_1111, 0b1111_0000,
])  # fmt: skip
# Of each 64 values, value i is i % 16 for the first 32, and 15 - i % 16 for the rest.
K_NIBBLES = NIBBLES * 8
K_VALUES = ([i % 16 for i in range(32)] + [15 - i % 16 for i in range(32)]) * 4


def test_q4_k_has_factors_for_each_32() -> None:
    data = struct.pack("<ee", 0.5, -0.25) + FACTORS + K_NIBBLES
    assert len(data) == 144
    assert values(WeightType.Q4_K, data, cols=256) == [
        [
            0.5 * SCALE_FACTORS[i // 32] * q + 0.25 * MIN_FACTORS[i // 32]
            for i, q in enumerate(K_VALUES)
        ]
    ]


def test_q5_k_keeps_fifth_bits_by_place() -> None:
    fifths = bytes([0b1000_0001, 0, 0b0001_0000, *bytes(29)])  # of values 0, 224 and 128 + 2
    data = struct.pack("<ee", 1.0, 2.0) + FACTORS + fifths + K_NIBBLES
    assert len(data) == 176
    q = list(K_VALUES)
    for i in (0, 224, 130):
        q[i] += 16
    assert values(WeightType.Q5_K, data, cols=256) == [
        [float(SCALE_FACTORS[i // 32] * q[i] - 2 * MIN_FACTORS[i // 32]) for i in range(256)]
    ]


def test_q6_k_has_signed_factors_for_each_16() -> None:
    factors = [-128, 127, 0, 1, -1, *range(2, 13)]
    # Bytes 3 and 32: upper bits 1, 2, 3, 0 of values 3, 35, 67, 99, and 3 of value 128 + 96.
    high = bytearray(64)
    high[3], high[32] = 0b00_11_10_01, 0b11_00_00_00
    data = NIBBLES * 8 + bytes(high) + struct.pack("<16be", *factors, 0.5)
    assert len(data) == 210
    # Of each 128 values, the first 64 are in low nibbles, the rest in high ones.
    q = ([i % 16 for i in range(64)] + [15 - i % 16 for i in range(64)]) * 2
    for i, upper in ((3, 1), (35, 2), (67, 3), (224, 3)):
        q[i] += 16 * upper
    assert values(WeightType.Q6_K, data, cols=256) == [
        [0.5 * factors[i // 16] * (q[i] - 32) for i in range(256)]
    ]


def test_k_types_round_once() -> None:
    """The widest of every part: factors and products are exact, and so the sum rounds once."""
    scale, min_ = 2047 / 1024, 2047 / 2**18
    block = struct.pack("<ee", scale, min_) + b"\xff" * 172
    (row,) = values(WeightType.Q5_K, block, cols=256)
    exact = scale * 63 * 31 - min_ * 63
    assert set(row) == {struct.unpack("<f", struct.pack("<f", exact))[0]} != {exact}
    block = b"\0" * 192 + struct.pack("<16be", *[127] * 16, scale)
    assert set(values(WeightType.Q6_K, block, cols=256)[0]) == {scale * 127 * -32}


@pytest.mark.parametrize(("type", "size"), [(WeightType.Q4_G32, 32), (WeightType.Q4_G128, 128)])
def test_groups_have_an_offset(type: WeightType, size: int) -> None:
    data = struct.pack("<ee", 0.25, -5.0) + NIBBLES * (size // 32)
    data += struct.pack("<ee", -2.0, 0.0) + NIBBLES * (size // 32)
    first, second = [0.25 * (q - 5) for q in UP_AND_DOWN], [-2.0 * q for q in UP_AND_DOWN]
    assert values(type, data, cols=2 * size) == [[*first * (size // 32), *second * (size // 32)]]


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
