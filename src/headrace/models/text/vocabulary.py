"""Tokenizers from model files: a folder's tokenizer.json, or the vocabulary in GGUF metadata.

What GGUF metadata leave unsaid (how each pre-tokenizer splits, which defaults hold) follows
llama.cpp, which defines the format.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from headrace.core.base.errors import ConfigError
from headrace.models.facts import Facts, naming
from headrace.models.files import read_bounded
from headrace.models.safetensors import MAX_JSON_BYTES, ModelFolder
from headrace.models.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Name of a byte-level pre-tokenizer -> the patterns that split a text, one after another. An empty
# list stands for the pattern of GPT-2, which the library has built in.
_SPLITS: dict[str, list[str]] = {
    "gpt2": [],
    "gpt-2": [],
    "smollm": [r"\p{N}"],
    "starcoder": [r"\p{N}"],
    "llama-bpe": [_LLAMA3_SPLIT],
    "llama3": [_LLAMA3_SPLIT],
    "llama-v3": [_LLAMA3_SPLIT],
    "qwen2": [_LLAMA3_SPLIT.replace("{1,3}", "")],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"],
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")

# A SentencePiece vocabulary has no longer pieces; a damaged one would cost quadratic time.
_MAX_PIECE_CHARS = 128

# How the library says where a vocabulary contradicts itself.
_WHY = re.compile(r"\s+")


def tokenizer_from_folder(folder: ModelFolder) -> Tokenizer:
    """From tokenizer.json; the end-of-text ids come from every config that names some."""
    path = folder.path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder.path}: the folder has no tokenizer.json",
            hint="save the model with a fast tokenizer",
        )
    data = read_bounded(path, MAX_JSON_BYTES)
    library = _built(path, lambda: tokenizers.Tokenizer.from_buffer(data))
    configs = [folder.json(name) for name in ("config.json", "generation_config.json")]
    named = [Facts(folder.path, values) for values in configs if values is not None]
    bos_ids = [id_ for facts in named for id_ in facts.token_ids("bos_token_id")]
    eos_ids = [id_ for facts in named for id_ in facts.token_ids("eos_token_id")]
    with naming(path):
        return Tokenizer(
            library, bos_token_id=bos_ids[0] if bos_ids else None, eos_token_ids=eos_ids
        )


def tokenizer_from_gguf(path: Path, metadata: Mapping[str, object]) -> Tokenizer:
    facts = Facts(path, metadata)
    tokens = facts.texts(_PREFIX + "tokens")
    if not tokens:
        raise facts.refuse("the file holds no vocabulary", hint="serve a complete model file")
    kinds = facts.numbers(_PREFIX + "token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise facts.refuse(f"{len(tokens)} tokens, but {len(kinds)} token types")
    match facts.text(_PREFIX + "model"):
        case "gpt2":
            library = _built(path, lambda: _byte_level(facts, tokens))
        case "llama":
            library = _built(path, lambda: _sentencepiece(facts, tokens, kinds))
        case other:
            raise facts.refuse(
                f"tokenizer {other!r} is not supported; supported are 'gpt2' and 'llama'"
            )
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    library.add_tokens(added)
    if (surrounding := _surrounding(facts, tokens)) is not None:
        library.post_processor = surrounding
    ends = [_token_id(facts, name, tokens) for name in ("eos", "eot", "eom")]
    return Tokenizer(
        library,
        bos_token_id=_token_id(facts, "bos", tokens),
        eos_token_ids=[id_ for id_ in ends if id_ is not None],
    )


def _byte_level(facts: Facts, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    kind = facts.text(_PREFIX + "pre", "default")
    splits = _SPLITS.get(kind)
    if splits is None:
        raise facts.refuse(
            f"pre-tokenizer {kind!r} is not supported; supported are {', '.join(_SPLITS)}"
        )
    merges = [_pair(facts, merge) for merge in facts.texts(_PREFIX + "merges")]
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=kind in _LLAMA3_NAMES)
    )
    # The patterns with letters in them are whole rules of their own; the rest comes before GPT-2's.
    has_own_rule = any(r"\p{L}" in split for split in splits)
    library.pre_tokenizer = pre.Sequence(
        [pre.Split(Regex(split), behavior="isolated") for split in splits]
        + [pre.ByteLevel(add_prefix_space=False, use_regex=not has_own_rule)]
    )
    if kind == "qwen2":
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    return library


def _pair(facts: Facts, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise facts.refuse(f"merge {merge!r} is not a pair of tokens")
    return left, right


def _sentencepiece(
    facts: Facts, tokens: Sequence[str], kinds: Sequence[float]
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the pair whose union has the best score is merged first; unknown
    characters become bytes.
    """
    scores = facts.numbers(_PREFIX + "scores")
    if len(scores) != len(tokens):
        raise facts.refuse(f"{len(tokens)} tokens, but {len(scores)} scores")
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    ranked = sorted(
        (id_ for id_, kind in enumerate(kinds) if kind == _NORMAL), key=lambda id_: -scores[id_]
    )
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[id_] for id_ in ranked)
        if len(token) <= _MAX_PIECE_CHARS
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = _token_id(facts, "unknown", tokens)
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaced: list[Any] = [normalizers.Replace(" ", "▁")]
    restored: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if facts.flag(_PREFIX + "add_space_prefix", True):
        spaced.insert(0, normalizers.Prepend("▁"))
        restored.append(decoders.Strip(" ", 1, 0))
    library.normalizer = normalizers.Sequence(spaced)
    library.decoder = decoders.Sequence(restored)
    return library


def _surrounding(facts: Facts, tokens: Sequence[str]) -> processors.TemplateProcessing | None:
    """What encoding adds around a text: the tokens that the file, or the default for its kind, asks
    for.
    """
    bos_default = (
        facts.text(_PREFIX + "model") == "llama"
        or facts.text(_PREFIX + "pre", "default") in _LLAMA3_NAMES
    )
    before = facts.flag(_PREFIX + "add_bos_token", bos_default)
    after = facts.flag(_PREFIX + "add_eos_token", False)
    bos = _token_id(facts, "bos", tokens) if before else None
    eos = _token_id(facts, "eos", tokens) if after else None
    if bos is None and eos is None:
        return None
    template = [*(["bos"] if bos is not None else []), "$A", *(["eos"] if eos is not None else [])]
    ids = [(name, id_) for name, id_ in (("bos", bos), ("eos", eos)) if id_ is not None]
    return processors.TemplateProcessing(single=template, special_tokens=ids)


def _token_id(facts: Facts, name: str, tokens: Sequence[str]) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    return facts.integer(key, low=0, high=len(tokens) - 1) if key in facts else None


def _built(path: Path, build: Any) -> tokenizers.Tokenizer:
    """The library raises bare exceptions where a vocabulary contradicts itself."""
    try:
        library: tokenizers.Tokenizer = build()
    except ConfigError:
        raise
    except Exception as error:
        why = _WHY.sub(" ", str(error))[:200]
        raise ConfigError(
            f"{path}: no tokenizer can be built from it: {why}", hint="fetch the file again"
        ) from None
    return library
