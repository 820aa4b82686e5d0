"""Text to token ids and back, on the `tokenizers` library.

Decoding is done here, from the bytes of each token: text is then the UTF-8 reading of a
concatenation, so it can be decoded piece by piece (see `detokenizer`), which the library's own
decoders do not guarantee.
"""

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

import tokenizers

from headrace.core.base.errors import ConfigError, RequestError
from headrace.models.text.length import LeastTokens, byte_of_char
from headrace.models.text.literal import LiteralText

# Tokens that end an answer in some chat format, whatever a file names as its end of text.
END_TOKENS = (
    "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
    "<|eot|>", "<end_of_turn>", "</s>",
)  # fmt: skip

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Thread-safe: nothing changes after construction except caches of pure results."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """`eos_token_ids` are those that the file names, its own end of text first; special tokens
        that end a chat turn in some format are added to them.
        """
        self._library = library
        self._spelling = _Spelling(library)
        self.literal = LiteralText(library)
        self._least = LeastTokens(library)
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(
            id_ for id_, token in library.get_added_tokens_decoder().items() if token.special
        )
        named = [id_ for id_ in eos_token_ids if id_ < self.vocab_size]
        ends = set(named) | {
            id_
            for text in END_TOKENS
            if (id_ := library.token_to_id(text)) is not None and id_ in self._special
        }
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(ends))
        self.bos_token_id = bos_token_id
        self.named_eos: int | None = named[0] if named else None
        self._bytes: dict[int, bytes] = {}

    def digest(self) -> str:
        """Changes with all that decides what tokens a text becomes, and what text they are."""
        return sha256(self._library.to_str().encode()).hexdigest()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`; strings of special tokens in it become those tokens.

        `add_special` adds what the model expects around a text (often a beginning-of-text token).
        RequestError for a text that is not valid Unicode (a lone surrogate).
        """
        try:
            # Unlike `encode`, this lets other threads run meanwhile: a long text takes seconds.
            (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special)
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the text is not valid Unicode", code="invalid_text") from None
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """Fewest tokens that `text` can have, told without tokenising it; 0 = it cannot be told."""
        return self._least.of(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Unknown ids have no text."""
        text = self.bytes_of(ids, skip_special=skip_special).decode("utf-8", "replace")
        return text.removeprefix(self.leading_space)

    def bytes_of(self, ids: Iterable[int], *, skip_special: bool) -> bytes:
        """The concatenated bytes of `ids`."""
        skipped = self._special if skip_special else frozenset()
        return b"".join([self.token_bytes(id_) for id_ in ids if id_ not in skipped])

    @property
    def leading_space(self) -> str:
        """What is dropped once from the beginning of a decoded text: the space that encoding put
        there, or "".
        """
        return self._spelling.leading_space

    def token_text(self, id_: int) -> str:
        """A token by itself as a client reads it; broken characters show as U+FFFD."""
        return self.token_bytes(id_).decode("utf-8", "replace")

    def token_bytes(self, id_: int) -> bytes:
        """The bytes that a token adds to a text."""
        known = self._bytes.get(id_)
        if known is None:
            token = self._library.id_to_token(id_) if id_ >= 0 else None
            known = self._bytes[id_] = b"" if token is None else self._spelling.bytes_of(token)
        return known


class _Spelling:
    """How a vocabulary spells bytes: as stand-in characters (GPT-2), or as text with <0xNN>
    (SentencePiece).

    It is read off the library's decoder; ConfigError for a decoder that works on more than one
    token at a time.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        steps = _decoder_steps(library)
        self._by_char = byte_of_char() if any(s["type"] == "ByteLevel" for s in steps) else {}
        self._replaced: list[tuple[str, str]] = []
        self._has_byte_tokens = False
        self.leading_space = ""
        for step in steps:
            match step:
                case {"type": "ByteLevel" | "Fuse"}:
                    pass
                case {"type": "ByteFallback"}:
                    self._has_byte_tokens = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replaced.append((old, new))
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    self.leading_space = " "
                case {"type": "Metaspace", "replacement": str(old)}:
                    self._replaced.append((old, " "))
                    if step.get("prepend_scheme") != "never":
                        self.leading_space = " "
                case _:
                    raise ConfigError(
                        f"the tokenizer's decoder {step['type']!r} is not supported",
                        hint="supported are byte-level BPE and SentencePiece tokenizers",
                    )

    def bytes_of(self, token: str) -> bytes:
        if self._by_char:
            try:
                return bytes([self._by_char[char] for char in token])
            except KeyError:  # an added token, spelled as it is
                return token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _decoder_steps(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if library.decoder is None:
        raise ConfigError(
            "the tokenizer has no decoder",
            hint="supported are byte-level BPE and SentencePiece tokenizers",
        )
    decoder = json.loads(library.decoder.__getstate__())
    steps: list[dict[str, Any]] = (
        decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    )
    return steps
