"""Token ids to text, as they come."""

import codecs
from collections.abc import Sequence

from headrace.models.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence. All pushes and the flush together equal `Tokenizer.decode`
    of all ids.

    A character whose bytes are spread over tokens is held back until it is complete; U+FFFD appears
    only for bytes that no continuation can make valid.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True  # no character has begun
        self._leading = tokenizer.leading_space

    def push(self, ids: Sequence[int]) -> str:
        """The characters that `ids` complete."""
        data = self._tokenizer.bytes_of(ids, skip_special=self._skip_special)
        # Most tokens are such, and the library's decoder is Python.
        if self._is_whole and not self._leading and data.isascii():
            return data.decode("ascii")
        return self._take(data, False)

    def flush(self) -> str:
        """What is left of an incomplete character, as U+FFFD; the sequence is over."""
        return self._take(b"", True)

    def _take(self, data: bytes, final: bool) -> str:
        text = self._utf8.decode(data, final)
        self._is_whole = not self._utf8.getstate()[0]
        if text and self._leading:
            text, self._leading = text.removeprefix(self._leading), ""
        return text
