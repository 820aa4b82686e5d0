"""Token ids for texts that nobody wrote: equal names give equal tokens, and others differ."""

from random import Random
from typing import Final

_POOL: Final = 1 << 16
_STRIDE: Final = 40_503  # odd, so that neighbours begin far from each other


class TokenBook:
    """Texts by number. Each begins with its number in two digits to the base of the vocabulary, so
    that no two begin alike; the rest comes out of one long list, since a slice costs next to
    nothing.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._pool = tuple(Random(seed).choices(range(vocab_size), k=_POOL)) * 2

    @property
    def last(self) -> int:
        """The largest number that a text can have."""
        return self._vocab_size**2 - 1

    def text(self, number: int, num_tokens: int) -> tuple[int, ...]:
        """`number` from 0 to `last`."""
        start = number * _STRIDE % _POOL
        rest = num_tokens - 2
        body = self._pool[start : start + min(rest, _POOL)] if rest > 0 else ()
        while len(body) < rest:
            body += self._pool[: min(rest - len(body), _POOL)]
        return (*divmod(number, self._vocab_size), *body)[: max(num_tokens, 0)]
