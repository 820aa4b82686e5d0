"""Answers of /v1/chat/completions: chunks, and whole ones."""

from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from headrace.core.base.plan import TokenLogprob
from headrace.live.choice import ChoiceDelta, ChoiceFinish
from headrace.server import sse
from headrace.server.answer import Answer, optional
from headrace.server.tokens import chat_logprobs, prompt_logprobs
from headrace.server.wire import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)


class ChatStream:
    """Writes chunks: first the role of each choice, then its text, then how it ended, then the
    usage.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._begun: set[int] = set()
        self._texts: dict[int, sse.TextEvent] = {}

    def add(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        if delta.finish is None and delta.index in self._texts and delta.token_ids:
            return self._texts[delta.index].of(delta.text)
        events = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            role = ChatDelta(role="assistant", content="")
            prompt_ids = self._answer.prompt_ids(0) if len(self._begun) == 1 else UNSET
            events += self._chunk(ChatChunkChoice(index=delta.index, delta=role), prompt_ids)
            if self._answer.is_text_only:
                any_text = ChoiceDelta(index=delta.index, text=sse.TextEvent.TEXT)
                self._texts[delta.index] = sse.TextEvent(self._text_chunk(any_text))
        if delta.text or delta.token_ids:
            events += sse.event(self._text_chunk(delta))
        if delta.finish is not None:
            events += self._chunk(
                ChatChunkChoice(
                    index=delta.index,
                    delta=ChatDelta(),
                    finish_reason=delta.finish.reason.value,
                    stop_reason=delta.finish.stop_reason,
                )
            )
        return events

    def end(self) -> bytes:
        if not self._answer.include_usage:
            return sse.DONE
        return sse.event(self._envelope([], self._answer.tally.usage(), UNSET)) + sse.DONE

    def _text_chunk(self, delta: ChoiceDelta) -> ChatChunk:
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text),
            logprobs=_logprobs(self._answer, delta.logprobs),
            token_ids=self._answer.token_ids(delta.token_ids),
        )
        return self._envelope([choice], self._answer.chunk_usage(), UNSET)

    def _chunk(self, choice: ChatChunkChoice, prompt_ids: list[int] | UnsetType = UNSET) -> bytes:
        return sse.event(self._envelope([choice], self._answer.chunk_usage(), prompt_ids))

    def _envelope(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType,
    ) -> ChatChunk:
        answer = self._answer
        return ChatChunk(
            id=answer.id,
            created=answer.created_s,
            model=answer.served.name,
            system_fingerprint=answer.served.fingerprint,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_ids,
        )


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: ChoiceFinish | None = None


class ChatWhole:
    """Gathers the choices and writes one body."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices: dict[int, _Choice] = {}
        self._prompt_logprobs: list[TokenLogprob] = []

    def add(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        choice = self._choices.setdefault(delta.index, _Choice())
        choice.text.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        choice.finish = delta.finish
        if delta.index == 0:
            self._prompt_logprobs += delta.prompt_logprobs
        return b""

    def end(self) -> bytes:
        answer = self._answer
        shown = optional(answer.show_prompt_logprobs, self._prompt_logprobs)
        body = Chat(
            id=answer.id,
            created=answer.created_s,
            model=answer.served.name,
            system_fingerprint=answer.served.fingerprint,
            choices=[self._choice(index, one) for index, one in sorted(self._choices.items())],
            usage=answer.tally.usage(),
            prompt_logprobs=(
                shown if shown is UNSET else prompt_logprobs(answer.served.tokens, shown)
            ),
            prompt_token_ids=answer.prompt_ids(0),
        )
        return msgspec.json.encode(body)

    def _choice(self, index: int, choice: _Choice) -> ChatChoice:
        finish = choice.finish
        return ChatChoice(
            index=index,
            message=ChatMessage("".join(choice.text)),
            logprobs=_logprobs(self._answer, choice.logprobs),
            finish_reason="stop" if finish is None else finish.reason.value,
            stop_reason=None if finish is None else finish.stop_reason,
            token_ids=self._answer.token_ids(choice.token_ids),
        )


def _logprobs(
    answer: Answer, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob]
) -> ChatLogprobs | None:
    return chat_logprobs(answer.served.tokens, logprobs) if answer.show_logprobs else None
