"""Loads and pieces are the same again, reach what they should, and stay short."""

from zlib import crc32

import pytest

from headrace.bench.twin.cases import (
    BURSTS,
    CASES,
    NUM_PARTS,
    SHARED,
    Case,
    parts_of,
    pieces_of,
)


def encode(text: str) -> list[int]:
    """A word is a token."""
    return [crc32(word.encode()) % 1000 for word in text.split()]


def test_loads_are_the_same_again_and_share_what_they_should() -> None:
    parts = parts_of(SHARED, encode, 60.0)
    assert parts == parts_of(SHARED, encode, 60.0)
    asks = [ask for part in parts for ask in part]
    beginnings = {tuple(encode(ask.prompt)[: SHARED.shared]) for ask in asks}
    assert len(beginnings) <= SHARED.num_groups < len(asks)
    for part in parts_of(BURSTS, encode, 60.0):
        assert len(part) == BURSTS.burst * len({ask.at_s for ask in part})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_part_is_empty_or_longer_than_it_should_be(case: Case) -> None:
    parts = parts_of(case.load, encode, 12.0)
    assert len(parts) == NUM_PARTS
    for part in parts:
        assert part[0].at_s == 0.0
        assert all(ask.at_s < 4.0 for ask in part)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_both_kinds_of_pieces_lie_around_each_part(num_workers: int) -> None:
    pieces = pieces_of(num_workers, encode)
    assert len(pieces) == NUM_PARTS + 1
    kinds = [[sorted(ask.num_output_tokens for ask in asks) for asks in piece] for piece in pieces]
    assert kinds[0] == kinds[2] != kinds[1] == kinds[3]
    texts = [ask.prompt for piece in pieces for asks in piece for ask in asks]
    assert len(texts) == len(set(texts))  # nothing is found in a cache
    for piece in pieces:
        # Less than ten seconds for each worker, at five hundred tokens a second.
        assert sum(len(encode(ask.prompt)) for asks in piece for ask in asks) < 4000 * num_workers
