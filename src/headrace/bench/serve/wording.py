"""Token ids of a workload as text: one word for each, so that equal ids are equal text.

A server's prefix cache then finds what the workload says is shared, and nothing else. Answers take
the place of ids too: a session's next prompt has what the server has really said.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Final

from headrace.core.base.errors import ConfigError

Encode = Callable[[str], Sequence[int]]
Message = dict[str, str]

FEWEST_WORDS: Final = 256
_REST: Final = -1  # stands for the tokens of an answer beyond its first


def common_words() -> tuple[str, ...]:
    """Words that are one token each, the space before included, in most vocabularies of English."""
    text = files("headrace.bench.serve").joinpath("words.txt").read_text("utf-8")
    return tuple(text.split())


def single_tokens(words: Sequence[str], encode: Encode) -> tuple[str, ...]:
    """Those that are one token behind another word. Raises ConfigError where few are."""
    first = words[0]
    num_alone = len(encode(first))
    found = tuple(word for word in words if len(encode(f"{first} {word}")) == num_alone + 1)
    if len(found) < FEWEST_WORDS:
        raise ConfigError(
            f"{len(found)} of {len(words)} common words are one token each in this tokenizer",
            hint="leave --tokenizer out: prompts then have as many words as tokens are asked",
        )
    return found


class Wording:
    """Ids from 0 to `vocab_size` - 1 are words. What `hear` returns stands for an answer."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._answers: list[str] = []

    @property
    def vocab_size(self) -> int:
        return len(self._words)

    @property
    def num_texts(self) -> int:
        """How many texts a TokenBook of this vocabulary tells apart."""
        return self.vocab_size**2

    def hear(self, answer: str, num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` ids (one or more) that stand for an answer."""
        self._answers.append(answer)
        answer_id = self.vocab_size + len(self._answers) - 1
        return (answer_id, *[_REST] * (num_tokens - 1))

    def text(self, tokens: Sequence[int]) -> str:
        """As one text, which answers are part of as they were given."""
        parts: list[str] = []
        for is_answer, part in self._parts(tokens):
            parts.append(part if is_answer or not parts else f" {part}")
        return "".join(parts)

    def messages(self, tokens: Sequence[int]) -> list[Message]:
        """As a chat, in which answers are those of the assistant."""
        return [
            {"role": "assistant" if is_answer else "user", "content": part}
            for is_answer, part in self._parts(tokens)
        ]

    def _parts(self, tokens: Sequence[int]) -> Iterator[tuple[bool, str]]:
        """(whether it is an answer, text), in order."""
        size, begin = self.vocab_size, 0
        # Most prompts hold no answer, and are long.
        places = [at for at, token in enumerate(tokens) if token >= size] if self._answers else []
        for place in [*places, len(tokens)]:
            while begin < place and tokens[begin] == _REST:
                begin += 1
            if begin < place:
                yield False, " ".join(map(self._words.__getitem__, tokens[begin:place]))
            if place < len(tokens):
                yield True, self._answers[tokens[place] - size]
            begin = place + 1
