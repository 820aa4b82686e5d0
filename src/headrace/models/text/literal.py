"""Messages that spell special tokens: kept as the text that they are.

A template writes special tokens, and so could whoever writes a message: `<|im_end|>` in its text
would end it, and what follows could speak as somebody else. So before a template renders, every
special token that a message spells is hidden behind a placeholder. In what the template made of it,
all special tokens are then the template's own. A second tokenizer, equal to the first but for the
spelling of its special tokens, tells them from the same characters in the text of a message.

The placeholders are made of noncharacters of Unicode, which no text for interchange has; those that
a message has all the same are hidden too. The other spelling contains a secret, so that nobody can
write it.
"""

import json
import re
import secrets
import threading
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headrace.core.base.errors import RequestError

# Around the number of a hidden text.
_HIDE, _SHOW = "\ufdd0\ufdd1"
_HIDDEN = re.compile(f"{_HIDE}([0-9]+){_SHOW}")


class LiteralText:
    """Hides the special tokens of one tokenizer. Thread-safe."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._added = sorted(library.get_added_tokens_decoder().items())
        special = [token.content for _, token in self._added if token.special and token.content]
        # The longest first, as the library finds them.
        special.sort(key=len, reverse=True)
        texts = [*special, _HIDE, _SHOW]
        self._secret = secrets.token_hex(8)
        self._numbers = {text: str(number) for number, text in enumerate(texts)}
        self._by_number = {number: text for text, number in self._numbers.items()}
        self._spelled = re.compile("|".join(map(re.escape, texts)))
        # Some vocabularies have a special token for characters that they lack. It forges nothing.
        unknown = getattr(library.model, "unk_token", None)
        self._forgeable = {
            id_ for id_, token in self._added if token.special and token.content != unknown
        }
        self._lock = threading.Lock()
        self._respelled: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None

    def is_needed(self, value: Any) -> bool:
        """Whether a text in `value`, plain data of any depth, spells a special token."""
        match value:
            case str():
                return self._spelled.search(value) is not None
            case dict():
                return any(self.is_needed(one) for pair in value.items() for one in pair)
            case list() | tuple():
                return any(map(self.is_needed, value))
            case _:
                return False

    def hide(self, value: Any) -> Any:
        """`value`, plain data of any depth, with a placeholder for each special token in a text."""
        match value:
            case str():
                return self._spelled.sub(
                    lambda found: f"{_HIDE}{self._numbers[found[0]]}{_SHOW}", value
                )
            case dict():
                return {self.hide(key): self.hide(one) for key, one in value.items()}
            case list() | tuple():
                return [self.hide(one) for one in value]
            case _:
                return value

    def show(self, text: str) -> str:
        """The text as it was before it was hidden."""
        return _HIDDEN.sub(lambda found: self._by_number.get(found[1], found[0]), text)

    def encode(self, text: str) -> list[int]:
        """Token ids of what a template made of hidden texts.

        Special tokens that it spells become these tokens, and those that are hidden stay text.
        RequestError where the vocabulary has no other way to say a hidden one.
        """
        library, ids_by_own = self._second()
        respelled = self._spelled.sub(
            lambda found: found[0] if found[0] in _HIDE + _SHOW else self._other(found[0]),
            text,
        )
        try:
            (encoding,) = library.encode_batch_fast(
                [self.show(respelled)], add_special_tokens=False
            )
        except (TypeError, UnicodeEncodeError):
            raise RequestError("the text is not valid Unicode", code="invalid_text") from None
        if not self._forgeable.isdisjoint(set(encoding.ids) - ids_by_own.keys()):
            raise RequestError(
                "a message spells a special token, which this tokenizer cannot take as text",
                param="messages",
                code="invalid_text",
            )
        return [ids_by_own.get(id_, id_) for id_ in encoding.ids]

    def _other(self, special: str) -> str:
        """How the second tokenizer spells a special token."""
        return f"{_SHOW}{self._secret}-{self._numbers[special]}{_HIDE}"

    def _second(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The tokenizer with respelled special tokens, and the true id of each of its added ones.

        Made when first needed, since most servers never need it, and it takes as much memory as the
        first one.
        """
        with self._lock:
            if self._respelled is None:
                self._respelled = self._make_second()
            return self._respelled

    def _make_second(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        state = json.loads(self._library.to_str()) | {"added_tokens": [], "post_processor": None}
        library = tokenizers.Tokenizer.from_str(json.dumps(state))
        ids_by_own: dict[int, int] = {}
        for id_, token in self._added:
            content = token.content
            if token.special and content:
                content = self._other(content)
            own = AddedToken(
                content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized
            )
            library.add_tokens([own])
            own_id = library.token_to_id(content)
            if own_id is not None:  # one without a text has none
                ids_by_own[own_id] = id_
        return library, ids_by_own
