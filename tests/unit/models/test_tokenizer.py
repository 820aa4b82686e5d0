"""Tokenizers from files: what a text becomes, what ids become, and the tokens with a meaning."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from headrace.core.base.errors import ConfigError, RequestError
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.vocabulary import tokenizer_from_gguf
from support.model_files import KINDS, MERGES, TOKENS, llama_metadata

PATH = Path("m.gguf")


def byte_level(**changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(
        PATH, llama_metadata(**{f"tokenizer__ggml__{key}": value for key, value in changes.items()})
    )


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(id_) for id_ in tokenizer.encode(text)]


# SentencePiece: specials, bytes, then pieces from the best score to the worst.
PIECES = ["▁t", "he", "▁the", "in", "▁in", "t", "h", "e", "i", "n", "▁", "a", "<"]
SP_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "[TOOL]"]
SP_KINDS = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]


def sentencepiece(**changes: Any) -> Tokenizer:
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SP_TOKENS,
        "tokenizer.ggml.token_type": SP_KINDS,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES) + 1)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return tokenizer_from_gguf(PATH, metadata | changed)


class TestByteLevel:
    def test_merges_in_their_order(self) -> None:
        assert texts(byte_level(), "the th") == ["th", "e", " ", "th"]

    def test_special_strings_in_a_text_are_tokens(self) -> None:
        tokenizer = byte_level()
        ids = tokenizer.encode("a<|im_end|>b")
        assert ids[1] == 1
        assert tokenizer.decode(ids) == "ab"
        assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|>b"

    def test_nothing_is_added_unless_the_file_asks(self) -> None:
        assert byte_level().encode("a") == byte_level().encode("a", add_special=False)
        both = byte_level(add_bos_token=True, add_eos_token=True)
        assert both.encode("a")[0] == 0
        assert both.encode("a")[-1] == 1
        assert len(both.encode("a", add_special=False)) == 1

    def test_llama3_begins_texts_by_default(self) -> None:
        assert byte_level(pre="llama-bpe").encode("")[0] == 0
        assert byte_level(pre="llama-bpe", add_bos_token=False).encode("") == []

    def test_names_the_tokens_that_end_an_answer(self) -> None:
        assert byte_level().eos_token_ids == (0, 1)
        assert byte_level(eot_token_id=9).eos_token_ids == (0, 1, 9)
        assert byte_level().named_eos == 1
        ordinary = byte_level(token_type=[1, 3, *KINDS[2:]])
        assert ordinary.eos_token_ids == (1,)

    def test_bytes_of_a_token(self) -> None:
        tokenizer = byte_level()
        assert tokenizer.token_bytes(TOKENS.index("Ġth")) == b" th"
        assert [tokenizer.token_bytes(2 + byte) for byte in range(256)] == [
            bytes([byte]) for byte in range(256)
        ]
        assert tokenizer.token_bytes(1) == b"<|im_end|>"
        assert tokenizer.token_bytes(len(TOKENS)) == b""
        assert tokenizer.token_bytes(-1) == b""

    def test_added_tokens_are_spelled_as_they_are(self) -> None:
        tokenizer = byte_level(tokens=[*TOKENS, "<tool call>"], token_type=[*KINDS, 4])
        ids = tokenizer.encode("x<tool call>")
        assert ids[-1] == len(TOKENS)
        assert tokenizer.decode(ids) == "x<tool call>"

    def test_a_lone_surrogate_is_the_clients_fault(self) -> None:
        with pytest.raises(RequestError, match="not valid Unicode"):
            byte_level().encode("a\ud800")

    @given(st.text())
    def test_decoding_undoes_encoding(self, text: str) -> None:
        tokenizer = TOKENIZERS["gpt2"]
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text

    @given(st.lists(st.integers(0, len(TOKENS) - 1)))
    def test_decodes_as_the_library_does(self, ids: list[int]) -> None:
        library = tokenizers.Tokenizer(
            models.BPE(
                vocab={token: i for i, token in enumerate(TOKENS)},
                merges=[(left, right) for left, right in (m.split(" ") for m in MERGES)],
            )
        )
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens(TOKENS[:2])
        for skip in (True, False):
            theirs = library.decode(ids, skip_special_tokens=skip)
            assert TOKENIZERS["gpt2"].decode(ids, skip_special=skip) == theirs


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt2", "it's 123 x", ["it", "'s", " 123", " x"]),
        ("smollm", "it's 123 x", ["it", "'s", " ", "1", "2", "3", " x"]),
        ("llama-bpe", "IT'S 12345\n\nx", ["IT", "'S", " ", "123", "45", "\n\n", "x"]),
        ("qwen2", "a  123", ["a", " ", " ", "1", "2", "3"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_each_pre_tokenizer_splits_its_way(pre: str, text: str, expected: list[str]) -> None:
    pieces = byte_level(pre=pre)._library.pre_tokenizer.pre_tokenize_str(text)
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in pieces] == expected


def test_qwen2_composes_characters() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    assert TOKENIZERS["qwen2"].encode(decomposed) == TOKENIZERS["qwen2"].encode(composed)
    assert TOKENIZERS["gpt2"].encode(decomposed) != TOKENIZERS["gpt2"].encode(composed)


class TestSentencePiece:
    def test_the_best_score_merges_first(self) -> None:
        assert texts(sentencepiece(), "the in") == ["<s>", " the", " in"]

    def test_unknown_characters_become_bytes(self) -> None:
        tokenizer = sentencepiece()
        ids = tokenizer.encode("é", add_special=False)
        assert [tokenizer.token_bytes(id_) for id_ in ids] == [b" ", b"\xc3", b"\xa9"]
        assert tokenizer.decode(ids) == "é"

    def test_the_first_space_comes_and_goes(self) -> None:
        tokenizer = sentencepiece()
        assert tokenizer.decode(tokenizer.encode("the")) == "the"
        assert tokenizer.decode(tokenizer.encode(" the")) == " the"
        bare = sentencepiece(add_space_prefix=False)
        assert bare.decode(bare.encode("the", add_special=False)) == "the"
        assert bare.leading_space == ""

    def test_special_strings_are_tokens(self) -> None:
        tokenizer = sentencepiece()
        ids = tokenizer.encode("<s>the[TOOL]</s>", add_special=False)
        assert ids[0] == 1
        assert ids[-1] == 2
        assert SP_TOKENS.index("[TOOL]") in ids
        assert tokenizer.decode(ids) == "the[TOOL]"
        assert tokenizer.eos_token_ids == (2,)

    @given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="▁")))
    def test_decoding_undoes_encoding(self, text: str) -> None:
        tokenizer = TOKENIZERS["llama"]
        assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == (
            text
        )

    @given(st.text("then i<a é", max_size=20))
    def test_encodes_by_the_definition(self, text: str) -> None:
        """Always merge the leftmost of the pairs whose union has the best score."""
        if not text:
            return
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            pairs = [
                (PIECES.index(parts[i] + parts[i + 1]), i)
                for i in range(len(parts) - 1)
                if parts[i] + parts[i + 1] in PIECES
            ]
            if not pairs:
                break
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        expected: list[int] = []
        for part in parts:
            if part in PIECES:
                expected.append(SP_TOKENS.index(part))
            else:
                expected += [3 + byte for byte in part.encode()]
        assert TOKENIZERS["llama"].encode(text, add_special=False) == expected

    def test_refuses_other_numbers_of_scores(self) -> None:
        with pytest.raises(ConfigError, match="but 1 scores"):
            sentencepiece(scores=[0.0])


def test_a_decoder_that_needs_more_than_one_token_is_refused() -> None:
    library = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(ConfigError, match="no decoder"):
        Tokenizer(library)
    library.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="'WordPiece' is not supported"):
        Tokenizer(library)


def test_a_metaspace_decoder_is_understood() -> None:
    library = tokenizers.Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    library.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(library)
    assert tokenizer.decode([0, 1, 0]) == library.decode([0, 1, 0]) == "ab a"


TOKENIZERS = {
    "gpt2": byte_level(),
    "qwen2": byte_level(pre="qwen2"),
    "llama": sentencepiece(),
}
