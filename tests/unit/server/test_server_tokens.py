"""Tokens as log probabilities show them."""

import math

import pytest

from headrace.core.base.plan import TokenLogprob
from headrace.server.tokens import (
    MIN_LOGPROB,
    CompletionLogprobsMaker,
    TextOffsets,
    TokenStrings,
    chat_logprobs,
    prompt_logprobs,
)
from support.fake_engine import IM_END, byte_tokenizer

TOKENS = TokenStrings(byte_tokenizer())


def logprob(token_id: int, value: float = -1.0, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id, value, 1, top)


def test_a_token_is_called_by_its_text_or_its_bytes() -> None:
    assert TOKENS.name(ord("a")) == "a"
    assert TOKENS.name(0xC3) == "bytes:\\xc3"
    assert TOKENS.name(IM_END) == "<|im_end|>"


@pytest.mark.parametrize(("skip", "expected"), [(True, [3, 4, 4, 5, 5]), (False, [3, 4, 4, 5, 15])])
def test_offsets_count_characters(skip: bool, expected: list[int]) -> None:
    offsets = TextOffsets(TOKENS, 3, skip_special=skip)
    ids = [ord("a"), *"é".encode(), IM_END, ord("b")]
    assert [offsets.next(token_id) for token_id in ids] == expected


def test_an_impossible_token_can_be_shown() -> None:
    one = logprob(65, -math.inf, (66, -0.1), (65, -math.inf))
    (shown,) = chat_logprobs(TOKENS, [one]).content
    assert (shown.token, shown.logprob, shown.bytes) == ("A", MIN_LOGPROB, [65])
    assert [(top.token, top.logprob) for top in shown.top_logprobs] == [
        ("B", -0.1),
        ("A", MIN_LOGPROB),
    ]


def test_the_chosen_token_is_among_the_alternatives() -> None:
    maker = CompletionLogprobsMaker(TOKENS, 0, skip_special=True)
    shown = maker.make([logprob(65, -2.0, (66, -0.1))])
    assert shown.top_logprobs == [{"B": -0.1, "A": -2.0}]
    assert maker.make([logprob(67)]).text_offset == [1]


def test_prompt_logprobs_have_ranks_from_one() -> None:
    first, second = prompt_logprobs(TOKENS, [logprob(65, -2.0, (66, -0.1))])
    assert first is None
    assert second is not None
    assert {key: one.rank for key, one in second.items()} == {"66": 1, "65": 2}
