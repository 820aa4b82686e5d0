"""How many tokens a text has at least, told without tokenising it.

Tokenising takes time in proportion to the text, and a text far beyond a model's context is not
worth it. Decides nothing about limits.
"""

import json
import unicodedata
from typing import Any

import tokenizers


class LeastTokens:
    """A token covers no more bytes than the longest piece of the vocabulary. Thread-safe."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._facts: tuple[int, bytes] | None = None

    def of(self, text: str) -> int:
        """0 where the tokenizer may drop parts of a text, or join parts of any length."""
        if self._facts is None:  # takes a look at each piece, which short texts are spared
            self._facts = _longest_piece(self._library), _unspelled(self._library)
        longest, unspelled = self._facts
        if not longest:
            return 0
        if any(step["type"] == "NFC" for step in _steps(self._library.normalizer)):
            text = unicodedata.normalize("NFC", text)
        num_bytes = len(text.encode("utf-8", "ignore").translate(None, unspelled))
        return -(-num_bytes // longest)


def _longest_piece(library: tokenizers.Tokenizer) -> int:
    """In bytes of text; 0 where tokens may stand for more than their piece."""
    added = library.get_added_tokens_decoder().values()
    is_plain = (
        isinstance(library.model, tokenizers.models.BPE)
        and library.truncation is None
        and all(_keeps_length(step) for step in _steps(library.normalizer))
        and all(_keeps_all(step) for step in _steps(library.pre_tokenizer))
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not is_plain:
        return 0
    pieces = library.get_vocab(with_added_tokens=False)
    if _is_byte_level(library):
        own = max(map(len, pieces), default=1)  # a character stands for a byte
    elif library.model.byte_fallback and all(f"<0x{byte:02X}>" in pieces for byte in range(256)):
        own = max(len(piece.encode()) for piece in pieces)
    else:
        return 0
    return max(own, *(len(token.content.encode()) for token in added), 1)


def _unspelled(library: tokenizers.Tokenizer) -> bytes:
    """Bytes that a byte-level vocabulary has no piece for: they are dropped from a text."""
    if not _is_byte_level(library):
        return b""
    spelled = set(library.get_vocab(with_added_tokens=False))
    return bytes(byte for char, byte in byte_of_char().items() if char not in spelled)


def byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest for U+0100 and up,
    in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


def _is_byte_level(library: tokenizers.Tokenizer) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(library.pre_tokenizer))


def _keeps_length(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "NFC" | "Prepend"}:  # what the first one shortens is measured after it
            return True
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new.encode()) >= len(old.encode())
        case _:
            return False


def _keeps_all(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": kind}:
            return kind in ("ByteLevel", "Digits", "Metaspace")
        case _:
            return False


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be one step or a sequence."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = (
        state.get("normalizers") or state.get("pretokenizers") or []
        if state["type"] == "Sequence"
        else [state]
    )
    return steps
