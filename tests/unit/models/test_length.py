"""The least number of tokens is never more than the true one."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre

from headrace.models.text.length import byte_of_char
from headrace.models.text.tokenizer import Tokenizer

KELVIN, HANGUL = "\u212a", "\u1112\u1161\u11ab"  # NFC leaves a third of their bytes
TEXTS = st.text(
    st.characters(blacklist_categories=["Cs"]) | st.sampled_from([KELVIN, "\u0301", "\t", " ", "a"])
)
CHARS = [char for char, _ in sorted(byte_of_char().items(), key=lambda pair: pair[1])]


def byte_level(
    missing: str = "", special: AddedToken | None = None, **parts: Any
) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Bytes, and the pieces `aa`, `aaaa`."""
    pieces = [char for char in CHARS if char not in missing] + ["aa", "aaaa"]
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: id_ for id_, piece in enumerate(pieces)},
            merges=[("a", "a"), ("aa", "aa")],
        )
    )
    library.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(library, name, part)
    if special is not None:
        library.add_tokens([special])
    return Tokenizer(library), library


def sentencepiece(num_bytes: int = 256) -> Tokenizer:
    pieces = [f"<0x{byte:02X}>" for byte in range(num_bytes)] + ["▁", "a", "▁a", "▁a▁a"]
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: id_ for id_, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("▁a", "▁a")],
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return Tokenizer(library)


BOUNDED = {
    "bytes": byte_level()[0],
    "some bytes": byte_level(missing="b\u0120")[0],
    "NFC": byte_level(normalizer=normalizers.NFC())[0],
    "sentencepiece": sentencepiece(),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXTS)
def test_a_text_has_at_least_so_many(name: str, text: str) -> None:
    tokenizer = BOUNDED[name]
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special=False))


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("unit", ["a", " a", "b", KELVIN, HANGUL, "▁a▁a", "aaaab"])
def test_long_texts_too(name: str, unit: str) -> None:
    tokenizer, text = BOUNDED[name], unit * 100
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special=False))


def test_the_bound_is_the_text_by_the_longest_piece() -> None:
    assert BOUNDED["bytes"].least_tokens("aaaa" * 5 + "b") == 6
    assert BOUNDED["some bytes"].least_tokens("aaaa b bb") == 1  # the others are dropped
    assert BOUNDED["NFC"].least_tokens(KELVIN * 8) == 2
    assert BOUNDED["sentencepiece"].least_tokens(" a" * 8) == 2


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace("ab", "c")},
        {"normalizer": normalizers.Replace(Regex("a+"), "a")},
        {
            "pre_tokenizer": pre.Sequence(
                [pre.Split(" ", "removed"), pre.ByteLevel(add_prefix_space=False)]
            )
        },
        {"pre_tokenizer": pre.Whitespace()},
        {"special": AddedToken("<s>", lstrip=True)},
    ],
    ids=str,
)
def test_nothing_is_told_where_text_may_vanish(parts: dict[str, Any]) -> None:
    assert byte_level(**parts)[0].least_tokens("a" * 1000) == 0


def test_nothing_is_told_of_a_tokenizer_that_cuts() -> None:
    tokenizer, library = byte_level()
    library.enable_truncation(4)
    assert tokenizer.least_tokens("a" * 1000) == 0


def test_nothing_is_told_where_unknown_characters_may_join() -> None:
    assert sentencepiece(num_bytes=255).least_tokens("a" * 1000) == 0


@pytest.mark.parametrize(
    "model",
    [models.Unigram([("a", 0.0)], 0), models.WordLevel({"a": 0}, unk_token="a"), models.BPE()],
    ids=["unigram", "words", "empty"],
)
def test_nothing_is_told_of_other_models(model: Any) -> None:
    library = tokenizers.Tokenizer(model)
    library.decoder = decoders.Metaspace()
    assert Tokenizer(library).least_tokens("a" * 1000) == 0
