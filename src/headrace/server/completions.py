"""Answers of /v1/completions: chunks, and whole ones, which have the same shape.

The choices of several prompts are numbered on: choice i of prompt p has index p * n + i.
"""

from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from headrace.core.base.plan import TokenLogprob
from headrace.live.choice import ChoiceDelta, ChoiceFinish
from headrace.server import sse
from headrace.server.answer import Answer
from headrace.server.tokens import CompletionLogprobsMaker, prompt_logprobs
from headrace.server.wire import Completion, CompletionChoice, CompletionLogprobs, Usage


@dataclass(slots=True)
class _Choice:
    """What is known of one choice so far."""

    prompt_index: int
    logprobs: CompletionLogprobsMaker
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: ChoiceFinish | None = None


class _Choices:
    """The choices of an answer by index, begun when their first delta comes."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.by_index: dict[int, _Choice] = {}

    def of(self, prompt_index: int, delta: ChoiceDelta) -> tuple[int, _Choice]:
        answer = self._answer
        index = prompt_index * answer.num_choices + delta.index
        if index not in self.by_index:
            start = 0 if answer.echo else len(answer.prompts[prompt_index].text)
            maker = CompletionLogprobsMaker(
                answer.served.tokens, start, skip_special=answer.skip_special
            )
            self.by_index[index] = _Choice(prompt_index, maker)
        choice = self.by_index[index]
        choice.prompt_logprobs += delta.prompt_logprobs
        return index, choice

    def echo(self, choice: _Choice) -> tuple[str, CompletionLogprobs | None]:
        """The prompt as the beginning of a choice."""
        prompt = self._answer.prompts[choice.prompt_index]
        if not self._answer.show_logprobs:
            return prompt.text, None
        return prompt.text, choice.logprobs.prompt(prompt.tokens, choice.prompt_logprobs)

    def logprobs(
        self, choice: _Choice, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob]
    ) -> CompletionLogprobs | None:
        return choice.logprobs.make(logprobs) if self._answer.show_logprobs else None


class CompletionStream:
    """Writes chunks: the echoed prompt where asked, then text, then how the choice ended, then the
    usage.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices = _Choices(answer)
        self._begun: set[int] = set()
        self._texts: dict[int, sse.TextEvent] = {}

    def add(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        index, choice = self._choices.of(prompt_index, delta)
        if delta.finish is None and index in self._texts and delta.token_ids:
            return self._texts[index].of(delta.text)
        events = b""
        # A delta without tokens and end only brings log probabilities of the prompt; they go out
        # together.
        if index not in self._begun and (delta.token_ids or delta.text or delta.finish):
            self._begun.add(index)
            events += self._begin(index, choice)
            if self._answer.is_text_only:
                any_text = CompletionChoice(index=index, text=sse.TextEvent.TEXT)
                self._texts[index] = sse.TextEvent(self._envelope(any_text))
        if delta.text or delta.token_ids:
            events += self._chunk(
                CompletionChoice(
                    index=index,
                    text=delta.text,
                    logprobs=self._choices.logprobs(choice, delta.logprobs),
                    token_ids=self._answer.token_ids(delta.token_ids),
                )
            )
        if delta.finish is not None:
            events += self._chunk(
                CompletionChoice(
                    index=index,
                    text="",
                    finish_reason=delta.finish.reason.value,
                    stop_reason=delta.finish.stop_reason,
                )
            )
        return events

    def end(self) -> bytes:
        if not self._answer.include_usage:
            return sse.DONE
        return sse.event(_envelope(self._answer, [], self._answer.tally.usage())) + sse.DONE

    def _begin(self, index: int, choice: _Choice) -> bytes:
        prompt_ids = self._answer.prompt_ids(choice.prompt_index)
        if not self._answer.echo and prompt_ids is UNSET:
            return b""
        text, logprobs = self._choices.echo(choice) if self._answer.echo else ("", None)
        return self._chunk(
            CompletionChoice(index=index, text=text, logprobs=logprobs, prompt_token_ids=prompt_ids)
        )

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return sse.event(self._envelope(choice))

    def _envelope(self, choice: CompletionChoice) -> Completion:
        return _envelope(self._answer, [choice], self._answer.chunk_usage())


class CompletionWhole:
    """Gathers the choices and writes one body."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._choices = _Choices(answer)

    def add(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        _, choice = self._choices.of(prompt_index, delta)
        choice.text.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.token_logprobs += delta.logprobs
        choice.finish = delta.finish
        return b""

    def end(self) -> bytes:
        choices = [
            self._choice(index, one) for index, one in sorted(self._choices.by_index.items())
        ]
        return msgspec.json.encode(_envelope(self._answer, choices, self._answer.tally.usage()))

    def _choice(self, index: int, choice: _Choice) -> CompletionChoice:
        answer, finish = self._answer, choice.finish
        text, before = self._choices.echo(choice) if answer.echo else ("", None)
        logprobs = self._choices.logprobs(choice, choice.token_logprobs)
        return CompletionChoice(
            index=index,
            text=text + "".join(choice.text),
            logprobs=_joined(before, logprobs),
            finish_reason=None if finish is None else finish.reason.value,
            stop_reason=None if finish is None else finish.stop_reason,
            prompt_logprobs=(
                prompt_logprobs(answer.served.tokens, choice.prompt_logprobs)
                if answer.show_prompt_logprobs
                else UNSET
            ),
            token_ids=answer.token_ids(choice.token_ids),
            prompt_token_ids=answer.prompt_ids(choice.prompt_index),
        )


def _envelope(
    answer: Answer, choices: list[CompletionChoice], usage: Usage | UnsetType | None
) -> Completion:
    return Completion(
        id=answer.id,
        created=answer.created_s,
        model=answer.served.name,
        system_fingerprint=answer.served.fingerprint,
        choices=choices,
        usage=usage,
    )


def _joined(
    first: CompletionLogprobs | None, second: CompletionLogprobs | None
) -> CompletionLogprobs | None:
    if first is None or second is None:
        return second
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
