"""Copies past the caches: the same bytes as any copy, wherever they begin and end."""

import mmap
import random

import pytest

from headrace.ops.native import _native


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 127, 128, 1000, 4096, 70_001])
def test_all_bytes_come_and_no_other_changes(num_bytes: int) -> None:
    rng = random.Random(num_bytes)
    source = rng.randbytes(num_bytes + 80)
    for to_offset, from_offset in [(0, 0), (1, 0), (0, 1), (63, 17), (rng.randrange(80), 80)]:
        target = bytearray(b"\xa5" * (num_bytes + 80))
        _native.copy_range(target, to_offset, source, from_offset, num_bytes)
        end = to_offset + num_bytes
        assert target[to_offset:end] == source[from_offset : from_offset + num_bytes]
        assert set(target[:to_offset] + target[end:]) <= {0xA5}


def test_what_does_not_fit_is_a_fault() -> None:
    for to_offset, from_offset in [(1, 0), (0, 1), (200, 0), (0, 2**63)]:
        with pytest.raises(_native.Fault, match="does not fit into 100 bytes"):
            _native.copy_range(bytearray(100), to_offset, bytes(100), from_offset, 100)


def test_nothing_is_written_to_what_may_only_be_read() -> None:
    with mmap.mmap(-1, 4096, access=mmap.ACCESS_READ) as memory, pytest.raises(BufferError):
        _native.copy_range(memory, 0, bytes(10), 0, 10)
