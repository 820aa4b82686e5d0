"""Frames arrive whole and in order, or not at all."""

import random
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.adapters.frames import (
    LONG_BYTES,
    MAX_FRAME_BYTES,
    FrameReader,
    FrameWriter,
    _Tags,
    direction_key,
    has_own_hash,
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


@pytest.mark.parametrize("num_bytes", [LONG_BYTES - 1, LONG_BYTES, LONG_BYTES + 7, 300_000])
def test_whoever_hashes_it_a_long_frame_is_the_same(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without the instructions understands one that has them, and the other way round."""
    payload = random.Random(num_bytes).randbytes(num_bytes)
    quick, quick_reader = FrameWriter(KEY), FrameReader(KEY)
    here = [quick.header(payload) for _ in range(3)]
    monkeypatch.setattr(_Tags, "_own_hash", lambda tags: None)
    plain, plain_reader = FrameWriter(KEY), FrameReader(KEY)
    assert [plain.header(payload) for _ in range(3)] == here
    assert plain_reader.feed(here[0] + payload) == [payload]
    monkeypatch.undo()
    for header in here[:2]:
        quick_reader.check(quick_reader.open(header)[1], payload)
    changed = bytearray(payload)
    changed[num_bytes // 2] ^= 4
    with pytest.raises(TransferError, match="frame 2 is not authentic"):
        quick_reader.check(quick_reader.open(here[2])[1], bytes(changed))


@pytest.mark.skipif(not has_own_hash(), reason="this processor has no VPCLMULQDQ")
def test_a_frame_is_checked_as_it_comes_over_a_socket() -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    near, far = socket.socketpair()
    with near, far:
        for payload in (b"", b"short", bytes(range(256)) * 100):
            _, tag = reader.open(writer.header(payload))
            far.sendall(payload)
            view = memoryview(bytearray(len(payload)))
            assert reader.receive(tag, near.fileno(), view, 1000)
            assert view == payload
        _, tag = reader.open(writer.header(b"right"))
        far.sendall(b"wrong")
        with pytest.raises(TransferError, match="frame 3 is not authentic"):
            reader.receive(tag, near.fileno(), memoryview(bytearray(5)), 1000)


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
