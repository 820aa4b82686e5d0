"""Prompts with an exact number of tokens, the same for the same seed.

Decides the words; refuses to know which tokenizer counts them.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence

from headrace.core.base.errors import ConfigError

Encode = Callable[[str], Sequence[int]]

# Most are one token with a space before them in any tokenizer that was trained on English.
WORDS = (
    "able after again air all always animal answer area ask back bad ball bank base beach bed "
    "begin bird black blood blue board boat body book both box bread bright bring brown build "
    "business call camp car care case cause cell chance change child choose church circle city "
    "clean clear close cloud coast cold color common cook cool corn count course cover cross "
    "dance dark day deep design develop different dinner direct distance doctor dog door down "
    "draw dress drink drive dry early earth east eat edge effect energy engine enough equal even "
    "evening ever example eye face fact family far farm fast father feel few field fight final "
    "find finger fire fish floor flow flower fly follow food foot"
).split()


class PromptWriter:
    """Writes prompts of known length. `encode` counts as the server does, specials included."""

    def __init__(self, encode: Encode, seed: int) -> None:
        self._encode = encode
        self._seed = seed
        self._rngs: dict[str, random.Random] = {}

    def write(self, num_tokens: int, *, after: str = "", topic: str = "") -> str:
        """A text that begins with `after` and has exactly `num_tokens` tokens altogether.

        What is written on other topics changes nothing, and no two texts begin alike but by chance.
        The tokens of `after` stay what they are, so that servers can share them.
        """
        start = list(self._encode(after)) if after else []
        if num_tokens <= len(start):
            raise ConfigError("prompt is shorter than its prefix", num_tokens=num_tokens)
        rng = self._rngs.setdefault(topic, random.Random(f"{self._seed} {topic}"))
        for _ in range(100):
            words = [rng.choice(WORDS) for _ in range(num_tokens)]
            text = self._cut(after, words, num_tokens)
            tokens = list(self._encode(text))
            if len(tokens) == num_tokens and tokens[: len(start)] == start:
                return text
        raise ConfigError("no text has this many tokens", num_tokens=num_tokens)

    def _cut(self, after: str, words: list[str], num_tokens: int) -> str:
        """`after` and as many of `words` as fit into `num_tokens` tokens."""

        def text(num_words: int) -> str:
            return " ".join(([after] if after else []) + words[:num_words])

        def count(num_words: int) -> int:
            return len(self._encode(text(num_words)))

        # Each word is at least one token, so the answer is among the first `num_tokens` words.
        return text(bisect_right(range(1, len(words) + 1), num_tokens, key=count))
