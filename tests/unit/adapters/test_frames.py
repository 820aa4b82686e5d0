"""Frames arrive whole and in order, or not at all."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.frames import (
    MAX_FRAME_BYTES,
    FrameReader,
    FrameWriter,
    direction_key,
)
from headrace.core.base.errors import TransferError

KEY = direction_key(b"secret", "to worker")


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), min_size=1))
def test_messages_arrive_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    stream = b"".join(writer.frame(payload) for payload in payloads)
    got, start, turn = [], 0, 0
    while start < len(stream):
        size = cuts[turn % len(cuts)]
        got += reader.feed(stream[start : start + size])
        start, turn = start + size, turn + 1
    assert got == payloads


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(place: int, change: int) -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    stream = bytearray(writer.frame(b"one") + writer.frame(b"two"))
    stream[place % len(stream)] ^= change
    try:
        got = reader.feed(bytes(stream))
    except TransferError:
        return
    # A length that has grown waits for bytes that never come; what was whole before it is right.
    assert got in ([], [b"one"])


def test_frames_that_are_repeated_left_out_swapped_or_sent_back_are_refused() -> None:
    writer = FrameWriter(KEY)
    first, second = writer.frame(b"first"), writer.frame(b"second")
    for stream in (first + first, second, second + first):
        with pytest.raises(TransferError, match="not authentic"):
            FrameReader(KEY).feed(stream)
    with pytest.raises(TransferError, match="frame 0 is not authentic"):
        FrameReader(direction_key(b"secret", "from worker")).feed(first)
    with pytest.raises(TransferError, match="not authentic"):
        FrameReader(direction_key(b"another", "to worker")).feed(first)


@given(st.binary(max_size=300), st.integers(1, 100), st.integers(0, 400))
def test_a_frame_is_the_same_in_parts(payload: bytes, size: int, place: int) -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    for _ in range(2):
        _, tag = reader.open(writer.header(payload))
        reader.check_parts(tag, parts(payload, size))
    _, tag = reader.open(writer.header(payload))
    changed = bytes(byte ^ (place % 400 == at) for at, byte in enumerate(payload))
    if changed == payload:
        changed += b"x"
    with pytest.raises(TransferError, match="frame 2 is not authentic"):
        reader.check_parts(tag, parts(changed, size))


def parts(payload: bytes, size: int) -> list[memoryview]:
    return [memoryview(payload)[at : at + size] for at in range(0, len(payload), size)]


def test_a_header_that_was_taken_back_leaves_no_gap() -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    writer.header(b"never sent")
    writer.take_back()
    assert reader.feed(writer.frame(b"first") + writer.frame(b"second")) == [b"first", b"second"]


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_come() -> None:
    header = struct.pack("<I16s", MAX_FRAME_BYTES + 1, b"")
    with pytest.raises(TransferError, match="longer than 64MiB"):
        FrameReader(KEY).feed(header)
    with pytest.raises(TransferError, match="longer than 64MiB"):
        FrameWriter(KEY).frame(bytes(MAX_FRAME_BYTES + 1))
