"""Ids are words, answers are what was said, and equal ids are equal text."""

import pytest

from headrace.bench.serve.wording import Wording, common_words, single_tokens
from headrace.core.base.errors import ConfigError
from support.fake_engine import byte_tokenizer

WORDS = ("ant", "bee", "cat", "dog")


def test_common_words_are_many_and_different() -> None:
    words = common_words()
    assert len(words) == len(set(words)) == 1024
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


def test_text_and_messages_of_words() -> None:
    wording = Wording(WORDS)
    assert wording.text((1, 1, 0)) == "bee bee ant"
    assert wording.messages((3, 2)) == [{"role": "user", "content": "dog cat"}]


def test_an_answer_takes_the_place_of_its_tokens() -> None:
    wording = Wording(WORDS)
    first, second = wording.hear(" it said", 3), wording.hear("", 1)
    tokens = (0, 1, *first, 2, *second, 3)
    assert len(tokens) == 8
    assert wording.text(tokens) == "ant bee it said cat dog"
    assert wording.messages(tokens) == [
        {"role": "user", "content": "ant bee"},
        {"role": "assistant", "content": " it said"},
        {"role": "user", "content": "cat"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "dog"},
    ]


def test_an_answer_that_is_cut_is_still_said_whole() -> None:
    wording = Wording(WORDS)
    heard = wording.hear("long", 5)
    assert wording.text((0, *heard)[:3]) == "antlong"


def test_words_of_one_token() -> None:
    def encode(text: str) -> list[int]:
        return [len(part) for word in text.split() for part in word.split("-")]

    words = [f"w{number}" for number in range(256)]
    assert single_tokens([*words, "two-parts"], encode) == tuple(words)
    with pytest.raises(ConfigError, match="0 of 1024 common words are one token"):
        single_tokens(common_words(), byte_tokenizer().encode)
