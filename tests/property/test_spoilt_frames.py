"""Frames on a way that loses, doubles, swaps, cuts and changes one in twenty: what is read is what
was sent, up to the first fault, and behind it nothing.
"""

from random import Random

import pytest

from headrace.adapters.frames import HEADER_BYTES, FrameReader, FrameWriter, direction_key
from headrace.core.base.errors import TransferError
from support.seeds import FEW_AND_A_THOUSAND

KEY = direction_key(b"sixteen letters!", "blocks")
NUM_FRAMES = 40


def spoil(rng: Random, frames: list[bytes]) -> tuple[bytes, int]:
    """The stream, and how many frames of it are whole and in their places."""
    frames, first_fault = list(frames), len(frames)
    for index in range(len(frames) - 1, -1, -1):
        if rng.random() > 0.05:
            continue
        frame, following = frames[index], frames[index + 1 : index + 2]
        match rng.randrange(5):
            case 0:
                frames[index : index + 1] = []
            case 1:
                frames[index : index + 1] = [frame, frame]
                index += 1
            case 2 if following:
                frames[index : index + 2] = [*following, frame]
            case 3:
                frames[index] = frame[: rng.randrange(len(frame))]
            case _:
                place = rng.randrange(len(frame))
                changed = bytearray(frame)
                changed[place] ^= 1 << rng.randrange(8)
                frames[index] = bytes(changed)
        first_fault = index
    return b"".join(frames), first_fault


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_what_is_read_is_what_was_sent_up_to_the_first_fault(seeds: range) -> None:
    num_faulty = 0
    for seed in seeds:
        rng, writer, reader = Random(seed), FrameWriter(KEY), FrameReader(KEY)
        payloads = [rng.randbytes(rng.randrange(200)) for _ in range(NUM_FRAMES)]
        stream, num_whole = spoil(rng, [writer.frame(payload) for payload in payloads])
        read: list[bytes] = []
        is_refused = False
        while stream and not is_refused:
            size = rng.randrange(1, 3 * HEADER_BYTES)
            part, stream = stream[:size], stream[size:]
            try:
                read += reader.feed(part)
            except TransferError:
                is_refused = True
        assert read == payloads[: len(read)], seed
        # Those that come in the same piece as a fault may be lost with it.
        assert len(read) <= num_whole, seed
        if num_whole == NUM_FRAMES:
            assert len(read) == NUM_FRAMES, seed
        num_faulty += num_whole < NUM_FRAMES
    assert num_faulty >= len(seeds) // 2
