"""Incremental detokenisation equals decoding at once, for any ids and any cut."""

from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from headrace.models.text.detokenizer import Detokenizer
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.vocabulary import tokenizer_from_gguf
from support.model_files import TOKENS, llama_metadata


def sentencepiece() -> Tokenizer:
    tokens = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁", "▁▁", "é", "🙂"]
    library = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[])
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(library)


BYTE_LEVEL = tokenizer_from_gguf(Path("m"), llama_metadata())
SENTENCEPIECE = sentencepiece()


def ids_of(data: bytes) -> list[int]:
    """One token for each byte."""
    return [2 + byte for byte in data]


def test_a_character_comes_when_it_is_whole() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    pushes = [detokenizer.push([id_]) for id_ in ids_of("a🙂é".encode())]
    assert pushes == ["a", "", "", "", "🙂", "", "é"]
    assert detokenizer.flush() == ""


def test_a_character_that_never_becomes_whole_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.push(ids_of(b"a\xf0\x9f")) == "a"
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_cannot_become_a_character_are_replaced_at_once() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.push(ids_of(b"\xf0\x9fa")) == "\N{REPLACEMENT CHARACTER}a"


def test_special_tokens_are_left_out_or_kept() -> None:
    ids = [*ids_of(b"a"), 1, *ids_of(b"b")]
    assert Detokenizer(BYTE_LEVEL).push(ids) == "ab"
    assert Detokenizer(BYTE_LEVEL, skip_special=False).push(ids) == "a<|im_end|>b"


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    assert detokenizer.push(ids_of(b"\xc3")) == ""
    assert detokenizer.push([1]) == ""
    assert detokenizer.push(ids_of(b"\xa9")) == "é"


def test_only_the_first_space_is_dropped() -> None:
    vocab = SENTENCEPIECE._library.get_vocab()
    a, b, space = vocab["▁a"], vocab["b"], vocab["▁"]
    detokenizer = Detokenizer(SENTENCEPIECE)
    assert [detokenizer.push([id_]) for id_ in (a, b, a, space, a)] == ["a", "b", " a", " ", " a"]
    detokenizer = Detokenizer(SENTENCEPIECE)
    assert [detokenizer.push([id_]) for id_ in (0, space, space, a)] == ["", "", " ", " a"]


IDS = st.one_of(
    st.lists(st.integers(0, len(TOKENS) - 1), max_size=60),
    st.text(max_size=20).map(lambda text: ids_of(text.encode())),
)


@given(ids=IDS, cuts=st.lists(st.integers(0, 60)), skip=st.booleans())
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
def test_pushes_and_flush_equal_decoding_at_once(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special=skip)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pushed = [detokenizer.push(ids[start:end]) for start, end in pairwise(edges)]
    assert "".join(pushed) + detokenizer.flush() == tokenizer.decode(ids, skip_special=skip)


@given(st.text(max_size=30))
def test_a_valid_text_never_shows_a_replacement(text: str) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    pieces = [detokenizer.push([id_]) for id_ in ids_of(text.encode())]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(1, 262), max_size=40))
def test_pieces_decode_as_the_library_does_where_bytes_are_valid(ids: list[int]) -> None:
    ours = SENTENCEPIECE.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in ours:
        assert ours == SENTENCEPIECE._library.decode(ids)
