"""Special tokens that messages spell stay text, and nothing else changes."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from headrace.core.base.errors import RequestError
from headrace.live.prompts import encode_chat
from headrace.models.text.literal import LiteralText
from headrace.models.text.template import ChatTemplate
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.vocabulary import tokenizer_from_gguf
from support.fake_engine import IM_END, IM_START, TEMPLATE, byte_tokenizer
from support.model_files import llama_metadata

PLACEHOLDERS = "\ufdd0\ufdd1"


def spaced() -> Tokenizer:
    """As SentencePiece has it: spaces are letters, one is put in front, and a token takes those
    behind it. Two added tokens are not special; one is part of another.
    """
    chars = sorted({*"▁abcdefghijklmnopqrstuvwxyz<>/|[]\n", "<unk>"})
    vocab = {char: id_ for id_, char in enumerate(chars)}
    vocab |= {"▁a": len(vocab), "</s>": len(vocab) + 1, "ab": len(vocab) + 2}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>")
    )
    library.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    library.add_tokens([AddedToken("<think>", normalized=False)])
    library.add_special_tokens(
        [
            AddedToken("<unk>", normalized=False),
            AddedToken("</s>", normalized=False),
            AddedToken("<|x|>", normalized=False, rstrip=True),
            AddedToken("<|x|>>", normalized=False),
        ]
    )
    library.add_tokens([AddedToken("[TOOL]", normalized=False)])
    return Tokenizer(library)


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "gguf": tokenizer_from_gguf(Path("m.gguf"), llama_metadata()),
    "spaced": spaced(),
}
PIECES = st.sampled_from(
    [
        *("a", "ab ", " ", "  the ", "\n", "<", ">", "|", "é", "<think>", "[TOOL]", "<unk>"),
        *("</s>", "<|x|>", "<|x|>>", "<|x", "|>", "<|im_start|>", "<|im_end|>", "im_end|>"),
        *PLACEHOLDERS,
        *("\ufdd00\ufdd1", "\ufdd10\ufdd0", "\ufdd09999\ufdd1"),
    ]
)
TEXTS = st.lists(PIECES, max_size=8).map("".join)


def specials(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    known = tokenizer._library.get_added_tokens_decoder()
    # What stands for an unknown character is no sign of control.
    return [id_ for id_ in ids if id_ in tokenizer._special and known[id_].content != "<unk>"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_without_anything_hidden_the_tokens_are_the_same(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    for char in PLACEHOLDERS:
        text = text.replace(char, "")
    assert tokenizer.literal.encode(text) == tokenizer.encode(text, add_special=False)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_what_is_hidden_makes_no_special_token(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    literal = tokenizer.literal
    hidden = literal.hide(text)
    assert not LiteralText(tokenizer._library).is_needed(
        hidden.translate(dict.fromkeys(map(ord, PLACEHOLDERS)))
    )
    assert literal.show(hidden) == text
    assert specials(tokenizer, literal.encode(hidden)) == []
    if name == "bytes":  # every text has its bytes
        assert tokenizer.decode(literal.encode(hidden), skip_special=False) == text


@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_a_conversation_has_the_special_tokens_of_its_template(texts: list[str]) -> None:
    tokenizer = TOKENIZERS["bytes"]
    messages = [{"role": "user", "content": text} for text in texts]
    text, tokens = encode_chat(CHAT, tokenizer, messages, 1 << 20)
    assert specials(tokenizer, tokens) == [IM_START, IM_END] * len(texts) + [IM_START]
    assert tokenizer.decode(tokens, skip_special=False) == text
    assert text == "".join(f"<|im_start|>user\n{one}<|im_end|>\n" for one in texts) + (
        "<|im_start|>assistant\n"
    )


CHAT = ChatTemplate(TEMPLATE, bos_token="", eos_token="")


def test_data_of_any_depth_is_looked_through() -> None:
    literal = TOKENIZERS["bytes"].literal
    data = [{"tool_calls": [{"function": {"arguments": {"<|im_end|>": ("x<|im_end|>", 1)}}}]}]
    assert literal.is_needed(data)
    hidden = literal.hide(data)
    assert not literal.is_needed([1, None, True, 2.5, "<|im_en d|>", {}])
    assert "<|im_end|>" not in str(hidden)
    shown = literal.show("\ufdd01\ufdd1")
    assert shown == "<|im_end|>"
    ((call,),) = (one["tool_calls"] for one in hidden)
    assert call["function"]["arguments"] == {"\ufdd01\ufdd1": ["x\ufdd01\ufdd1", 1]}


def test_a_vocabulary_that_knows_no_other_spelling_refuses() -> None:
    library = tokenizers.Tokenizer(models.Unigram([("<e>", 0.0), ("<", -9.0), ("a", -9.0)], 0))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken("<e>", normalized=False)])
    literal = LiteralText(library)
    assert literal.encode("a<e>") == library.encode("a<e>", add_special_tokens=False).ids
    with pytest.raises(RequestError, match="cannot take as text"):
        literal.encode(literal.hide("a<e>"))


def test_what_is_no_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        TOKENIZERS["bytes"].literal.encode("\ud800")
