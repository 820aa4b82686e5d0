"""Prompts have exactly the asked number of tokens, whatever the tokenizer does to words."""

import re

import pytest

from headrace.bench.prompts import PromptWriter
from headrace.core.base.errors import ConfigError


def by_pieces(text: str) -> list[int]:
    """Pieces of at most three letters, so that most words are several tokens; 0 begins a text."""
    return [0, *(hash_of(piece) for piece in re.findall(r" ?[a-z]{1,3}", text))]


def hash_of(piece: str) -> int:
    return int.from_bytes(piece.encode(), "big")


@pytest.mark.parametrize("num_tokens", [2, 3, 17, 256])
def test_length_is_exact(num_tokens: int) -> None:
    assert len(by_pieces(PromptWriter(by_pieces, seed=1).write(num_tokens))) == num_tokens


def test_prefix_keeps_its_tokens() -> None:
    writer = PromptWriter(by_pieces, seed=1)
    prefix = writer.write(40)
    one, two = (by_pieces(writer.write(50, after=prefix)) for _ in range(2))
    assert len(one) == len(two) == 50
    assert one[:40] == two[:40] == by_pieces(prefix)
    assert one != two


def test_a_seed_decides_the_text() -> None:
    first, second, other = (PromptWriter(by_pieces, seed).write(64) for seed in (7, 7, 8))
    assert first == second != other


def test_impossible_lengths_are_refused() -> None:
    writer = PromptWriter(by_pieces, seed=1)
    with pytest.raises(ConfigError, match="shorter than its prefix"):
        writer.write(5, after=writer.write(5))
    with pytest.raises(ConfigError, match="no text has this many"):
        PromptWriter(lambda text: [1] * (2 * len(text.split())), seed=1).write(7)
