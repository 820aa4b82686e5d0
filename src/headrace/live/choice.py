"""One choice of a request: from tokens to text that is safe to send, and the end of it.

Which delta carries what: text goes out as soon as no stop string can begin in it; a token, with its
log probability, goes out with the delta that carries the last of its text. Tokens without text of
their own (an unfinished character, a skipped special token) go with the next text, or with the
finish.
"""

from collections import deque
from dataclasses import dataclass

import msgspec

from headrace.core.base.events import Emit, Finish
from headrace.core.base.plan import TokenLogprob
from headrace.core.base.request import FinishReason
from headrace.core.base.sampling import SamplingParams
from headrace.models.text.detokenizer import Detokenizer
from headrace.models.text.stops import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFinish:
    """How a choice ended."""

    reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token id; None for the model's own end
    num_prompt_tokens: int
    num_output_tokens: int  # up to and including the token that completed a stop string
    num_cached_tokens: int  # prompt tokens whose KV was found
    error: str = ""  # only with FinishReason.ERROR


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one choice. The deltas of a choice concatenate to the whole."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids, where asked
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # for prompt tokens 1, 2, …
    finish: ChoiceFinish | None = None


@dataclass(slots=True)
class _Held:
    """A token that has not gone out: `end` is where its text ends in the output; None = no text."""

    token: int
    logprob: TokenLogprob | None
    end: int | None


class Choice:
    """Feed it a sequence's words in order until a delta has a finish; not thread-safe."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        *,
        num_prompt_tokens: int,
        hidden_tokens: frozenset[int],  # these end the choice and are no text
        detokenizer: Detokenizer,
        stops: StopMatcher,
    ) -> None:
        self._index = index
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._hidden = hidden_tokens
        self._detokenizer = detokenizer
        self._stops = stops
        self._num_output_tokens = 0
        self._num_cached_tokens: int | None = None
        self._held: deque[_Held] = deque()
        self._num_known_chars = 0  # of text, as far as tokens have completed it
        self._num_sent_chars = 0

    def admit(self, num_cached_tokens: int) -> None:
        if self._num_cached_tokens is None:
            self._num_cached_tokens = num_cached_tokens

    def emit(self, words: Emit) -> ChoiceDelta | None:
        """The delta that new tokens make, if they make one; it has a finish where a stop string is
        complete.
        """
        is_usual = len(words.tokens) == 1 and not (self._held or words.prompt_logprobs)
        if is_usual and self._stops.passes_all:
            return self._emit_one(words)
        text = ""
        for i, token in enumerate(words.tokens):
            text += self._push(token, words.logprobs[i] if words.logprobs else None)
            if self._stops.matched is not None:
                return self._finished(
                    text, FinishReason.STOP, self._stops.matched, words.prompt_logprobs
                )
        self._num_sent_chars += len(text)
        tokens, logprobs = self._release(self._num_safe())
        if not (text or tokens or words.prompt_logprobs):
            return None
        return ChoiceDelta(
            index=self._index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=words.prompt_logprobs,
        )

    def _emit_one(self, words: Emit) -> ChoiceDelta | None:
        """As `emit`, for what nearly all words are: a token with text of its own, which nothing
        holds back.
        """
        (token,) = words.tokens
        text = "" if token in self._hidden else self._detokenizer.push(words.tokens)
        self._num_output_tokens += 1
        if not text:
            logprob = words.logprobs[0] if words.logprobs else None
            self._held.append(_Held(token, logprob, None))
            return None
        self._num_known_chars += len(text)
        self._num_sent_chars += len(text)
        return ChoiceDelta(
            index=self._index, text=text, token_ids=words.tokens, logprobs=words.logprobs
        )

    def finish(self, words: Finish) -> ChoiceDelta:
        """The last delta: what was held back, and how it ended."""
        text = self._stops.push(self._detokenizer.flush())
        if self._stops.matched is not None:
            return self._finished(text, FinishReason.STOP, self._stops.matched)
        text += self._stops.flush()
        is_asked = words.stop_token_id in self._params.stop_token_ids
        self.admit(words.num_cached_tokens)
        return self._finished(
            text, words.reason, words.stop_token_id if is_asked else None, error=words.error
        )

    def _push(self, token: int, logprob: TokenLogprob | None) -> str:
        self._num_output_tokens += 1
        piece = "" if token in self._hidden else self._detokenizer.push((token,))
        self._num_known_chars += len(piece)
        self._held.append(_Held(token, logprob, self._num_known_chars if piece else None))
        # A stop string may end a choice only once min_tokens have come, so the text before that is
        # not its concern.
        if self._num_output_tokens < self._params.min_tokens:
            return piece
        return self._stops.push(piece)

    def _num_safe(self) -> int:
        """Leading held tokens whose text has gone out."""
        num_safe = 0
        for count, held in enumerate(self._held, start=1):
            if held.end is not None:
                if held.end > self._num_sent_chars:
                    break
                num_safe = count
        return num_safe

    def _release(self, count: int) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        out = [self._held.popleft() for _ in range(count)]
        logprobs = tuple(held.logprob for held in out if held.logprob is not None)
        return tuple(held.token for held in out), logprobs

    def _finished(
        self,
        text: str,
        reason: FinishReason,
        stop_reason: str | int | None,
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
        error: str = "",
    ) -> ChoiceDelta:
        tokens, logprobs = self._release(len(self._held))
        return ChoiceDelta(
            index=self._index,
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=ChoiceFinish(
                reason=reason,
                stop_reason=stop_reason,
                num_prompt_tokens=self._num_prompt_tokens,
                num_output_tokens=self._num_output_tokens,
                num_cached_tokens=self._num_cached_tokens or 0,
                error=error,
            ),
        )
