"""Tokens as text and bytes, as log probabilities show them."""

import codecs
from collections.abc import Iterable, Sequence

from headrace.core.base.plan import TokenLogprob
from headrace.models.text.tokenizer import Tokenizer
from headrace.server.wire import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

# JSON has no infinity, and OpenAI shows an impossible token like this.
MIN_LOGPROB = -9999.0


class TokenStrings:
    """What a token is called: its text where it is whole characters, else its bytes, as OpenAI
    writes them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._name(token_id)
        return name

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def is_skipped(self, token_id: int) -> bool:
        """Whether a token adds nothing to a text without special tokens (end of text, role
        markers).
        """
        return not self._tokenizer.bytes_of([token_id], skip_special=True)

    def _name(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode() or self._tokenizer.token_text(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TextOffsets:
    """Where each token begins in the text, in characters. A token within a character begins where
    that does.
    """

    def __init__(self, tokens: TokenStrings, start: int, *, skip_special: bool) -> None:
        self._tokens = tokens
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = start

    def next(self, token_id: int) -> int:
        offset = self._num_chars
        if not (self._skip_special and self._tokens.is_skipped(token_id)):
            self._num_chars += len(self._decoder.decode(self._tokens.bytes_of(token_id)))
        return offset


def shown(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def chat_logprobs(tokens: TokenStrings, logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs([_chat_logprob(tokens, one) for one in logprobs])


def _chat_logprob(tokens: TokenStrings, one: TokenLogprob) -> ChatLogprob:
    top = [
        TopLogprob(tokens.name(token_id), shown(logprob), list(tokens.bytes_of(token_id)))
        for token_id, logprob in one.top
    ]
    name, raw = tokens.name(one.token_id), list(tokens.bytes_of(one.token_id))
    return ChatLogprob(name, shown(one.logprob), raw, top)


class CompletionLogprobsMaker:
    """Makes the legacy form of one choice, delta by delta, with offsets that run on."""

    def __init__(self, tokens: TokenStrings, start: int, *, skip_special: bool) -> None:
        self._tokens = tokens
        self._offsets = TextOffsets(tokens, start, skip_special=skip_special)

    def prompt(
        self, prompt_tokens: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """Of an echoed prompt: nothing is known of its first token."""
        first, rest = prompt_tokens[0], self.make(logprobs, begin=prompt_tokens[0])
        return CompletionLogprobs(
            [self._tokens.name(first), *rest.tokens],
            [None, *rest.token_logprobs],
            [None, *rest.top_logprobs],
            rest.text_offset,
        )

    def make(
        self, logprobs: Sequence[TokenLogprob], *, begin: int | None = None
    ) -> CompletionLogprobs:
        before = [] if begin is None else [self._offsets.next(begin)]
        return CompletionLogprobs(
            [self._tokens.name(one.token_id) for one in logprobs],
            [shown(one.logprob) for one in logprobs],
            [self._top(one) for one in logprobs],
            before + [self._offsets.next(one.token_id) for one in logprobs],
        )

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        # Of tokens with the same name, the likeliest is shown; the chosen one is always there.
        top: dict[str, float] = {}
        for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
            top.setdefault(self._tokens.name(token_id), shown(logprob))
        return top


def prompt_logprobs(tokens: TokenStrings, logprobs: Iterable[TokenLogprob]) -> PromptLogprobs:
    """vLLM's form: for each prompt token its own log probability and the likeliest ones."""
    listed: PromptLogprobs = [None]
    for one in logprobs:
        entry = {
            str(token_id): PromptLogprob(shown(logprob), rank, tokens.name(token_id))
            for rank, (token_id, logprob) in enumerate(one.top, start=1)
        }
        own = PromptLogprob(shown(one.logprob), one.rank + 1, tokens.name(one.token_id))
        entry.setdefault(str(one.token_id), own)
        listed.append(entry)
    return listed
