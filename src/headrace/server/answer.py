"""What all forms of an answer have in common, and the choice made once: what of it is shown."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

from msgspec import UNSET, UnsetType

from headrace.server.generation import Tally
from headrace.server.prompts import Prompt
from headrace.server.service import Served
from headrace.server.wire import GenerationRequest, Usage

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    id: str
    created_s: int
    served: Served
    prompts: Sequence[Prompt]
    tally: Tally
    num_choices: int  # of each prompt
    show_logprobs: bool
    show_prompt_logprobs: bool
    show_token_ids: bool
    skip_special: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool = False

    def prompt_ids(self, prompt_index: int) -> list[int] | UnsetType:
        return optional(self.show_token_ids, self.prompts[prompt_index].tokens)

    def token_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return optional(self.show_token_ids, token_ids)

    @property
    def is_text_only(self) -> bool:
        """Whether chunks in the middle of it differ in their text alone."""
        return not (self.show_logprobs or self.show_token_ids or self.continuous_usage)

    def chunk_usage(self) -> Usage | UnsetType | None:
        """The usage field of a chunk: absent unless asked for, null until the end unless asked for
        all along.
        """
        if self.continuous_usage:
            return self.tally.usage()
        return None if self.include_usage else UNSET


def optional(is_shown: bool, values: Sequence[Value]) -> list[Value] | UnsetType:
    return list(values) if is_shown else UNSET


def answer_for(
    request: GenerationRequest,
    served: Served,
    prompts: Sequence[Prompt],
    *,
    prefix: str,
    show_logprobs: bool,
    echo: bool = False,
) -> Answer:
    options = request.stream_options
    include_usage = bool(options and options.include_usage)
    return Answer(
        id=f"{prefix}-{uuid4().hex}",
        created_s=int(time.time()),
        served=served,
        prompts=prompts,
        tally=Tally(prompt_tokens=sum(len(prompt.tokens) for prompt in prompts)),
        num_choices=1 if request.n is None else request.n,
        show_logprobs=show_logprobs,
        show_prompt_logprobs=request.prompt_logprobs is not None,
        show_token_ids=bool(request.return_token_ids),
        skip_special=request.skip_special_tokens is not False,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        echo=echo,
    )
