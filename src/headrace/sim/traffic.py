"""Recorded traffic as a Source: its times, lengths and shared blocks, with made-up tokens.

Blocks of the same name become the same tokens, in prompts and in answers, so that whoever asks
again with an answer in the prompt finds it cached, as it was.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.workload.recording import NAME_BYTES, Recorded, Recording
from headrace.core.workload.tokens import TokenBook

VOCAB: Final = 1 << 15
KEPT_TEXTS: Final = 4096  # of sequences that run, about; more are made again and again
NO_LIMITS: Final = Slo()


class RecordedSource:
    """A Source. A request's id is its place in the recording, and times count from the first one;
    `speed` 2 lets everything come in half the time.

    Of those that had no answer, nobody knows how long it would have been: they are taken for the
    median of the others.
    """

    has_follow_ups = False

    def __init__(self, recording: Recording, *, speed: float = 1.0) -> None:
        self._requests = recording.requests
        self._size = recording.begin.block_tokens
        self._speed = speed
        self._book = TokenBook(VOCAB)
        answered = sorted(one.output_tokens for one in self._requests if one.output_tokens)
        self._usual_output = answered[len(answered) // 2] if answered else 1
        self._numbers: dict[bytes, int] = {}  # of blocks and tails by their names
        self._tails: dict[int, tuple[int, int]] = {}  # how blocks begin that prompts end in
        self._chains = [self._chain(one) for one in self._requests]
        self._text = lru_cache(KEPT_TEXTS)(self._written_text)

    def arrivals(self) -> Iterator[SeqSpec]:
        first_ns = self._requests[0].arrived_ns if self._requests else 0
        for index, one in enumerate(self._requests):
            yield SeqSpec(
                seq_id=SeqId(index),
                request_id=str(index),
                prompt_tokens=self._text(index)[: one.prompt_tokens],
                params=SamplingParams(max_tokens=self.num_output(one), ignore_eos=True),
                priority=one.priority,
                slo=one.slo or NO_LIMITS,
                arrived_ns=Ns(round((one.arrived_ns - first_ns) / self._speed)),
            )

    def follow_up(self, spec: SeqSpec, output: Sequence[int], now: Ns) -> SeqSpec | None:
        return None

    def written(self, seq_id: SeqId, start: int, end: int) -> tuple[int, ...]:
        """What a sequence has at these positions."""
        return self._text(seq_id)[start:end]

    def num_output(self, one: Recorded) -> int:
        return one.output_tokens or min(one.max_tokens, self._usual_output)

    # ---- texts

    def _chain(self, one: Recorded) -> "array[int]":
        """The numbers of its blocks. A block in which the prompt ends, and which nobody has had
        before, begins with the prompt's own end.
        """
        names = [one.blocks[i : i + NAME_BYTES] for i in range(0, len(one.blocks), NAME_BYTES)]
        place, num_rest = divmod(one.prompt_tokens, self._size)
        if one.tail and place < len(names) and names[place] not in self._numbers:
            chain = array("L", map(self._number, names))
            self._tails[chain[place]] = self._number(one.tail), num_rest
            return chain
        return array("L", map(self._number, names))

    def _number(self, name: bytes) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _block(self, number: int) -> tuple[int, ...]:
        tail, num_rest = self._tails.get(number, (0, 0))
        text = self._named(number, self._size)
        return self._named(tail, num_rest) + text[num_rest:] if num_rest else text

    def _named(self, number: int, num_tokens: int) -> tuple[int, ...]:
        """Texts of neighbouring numbers differ in their first token already, or blocks would seem
        to share their beginnings.
        """
        high, low, *rest = self._book.text(number, max(2, num_tokens))
        return (low, high, *rest)[:num_tokens]

    def _written_text(self, index: int) -> tuple[int, ...]:
        """Prompt and answer."""
        one = self._requests[index]
        tokens: list[int] = []
        for number in self._chains[index]:
            tokens += self._block(number)
        num_prompt, place = one.prompt_tokens, one.prompt_tokens // self._size
        if one.tail and place * self._size == len(tokens):
            tokens += self._named(self._number(one.tail), num_prompt - len(tokens))
        # Behind all names a text of its own, from the other end of the numbers.
        missing = num_prompt + self.num_output(one) - len(tokens)
        if missing > 0:
            tokens += self._named(self._book.last - index, missing)
        return tuple(tokens)
