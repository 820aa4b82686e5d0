"""One booted model in this process that answers prompts: what `chat` and `generate` share."""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.cli.output import showing_progress
from headrace.cli.sampling import SamplingFlags
from headrace.core.base.errors import DeviceError, RequestError
from headrace.core.base.request import FinishReason
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns
from headrace.core.config.schema import Config
from headrace.live.boot import Booted, boot
from headrace.live.generate import ChoiceFinish, GenerateRequest, TextEngine
from headrace.live.prompts import encode_chat, encode_text

MAX_SEED = 2**63


@dataclass(slots=True)
class Answer:
    """Iterate over it for the text as it comes; the rest is there when the iteration has ended."""

    engine: TextEngine
    request: GenerateRequest
    first_ns: int | None = None
    ended_ns: int = 0
    finish: ChoiceFinish | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            # The stream is a local, so that it ends with this iteration, however that ends.
            for delta in self.engine.stream_sync(self.request):
                if delta.token_ids and self.first_ns is None:
                    self.first_ns = time.monotonic_ns()
                if delta.text:
                    yield delta.text
                if delta.finish is not None:
                    self.finish = delta.finish
        finally:
            self.ended_ns = time.monotonic_ns()
        if self.finish is not None and self.finish.reason is FinishReason.ERROR:
            raise DeviceError(self.finish.error)

    def figures(self) -> dict[str, object]:
        """What a person wants to know of an answer that has ended; units are in the keys."""
        if self.finish is None:
            return {}
        first_ns = self.ended_ns if self.first_ns is None else self.first_ns
        later_tokens = self.finish.num_output_tokens - 1
        decode_ns = self.ended_ns - first_ns
        return {
            "finish_reason": self.finish.reason.value,
            "num_prompt_tokens": self.finish.num_prompt_tokens,
            "num_cached_tokens": self.finish.num_cached_tokens,
            "num_output_tokens": self.finish.num_output_tokens,
            "seed": self.request.params.seed,
            "ttft_ms": round((first_ns - self.request.arrived_ns) / NS_PER_MS, 3),
            "e2e_ms": round((self.ended_ns - self.request.arrived_ns) / NS_PER_MS, 3),
            "output_tokens_per_s": (
                round(later_tokens * NS_PER_S / decode_ns, 2)
                if later_tokens > 0 and decode_ns > 0
                else None
            ),
        }


class Answerer:
    """Answers one prompt at a time with one way of sampling."""

    def __init__(self, booted: Booted, sampling: SamplingFlags) -> None:
        self._booted = booted
        self._sampling = sampling
        self._num_asked = 0

    @property
    def model_name(self) -> str:
        return self._booted.name

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Answer:
        """The answer to a conversation."""
        template = self._booted.chat_template
        if template is None:
            raise RequestError(
                "the model has no chat template",
                hint="headrace generate --raw continues a text; --chat-template names a template",
            )
        engine, given = self._booted.text_engine, [dict(message) for message in messages]
        _, tokens = encode_chat(template, engine.tokenizer, given, engine.max_model_len)
        return self._ask(tokens)

    def complete(self, text: str) -> Answer:
        """What follows a text."""
        engine = self._booted.text_engine
        return self._ask(encode_text(engine.tokenizer, text, engine.max_model_len))

    def _ask(self, tokens: Sequence[int]) -> Answer:
        flags = self._sampling
        self._num_asked += 1
        params = SamplingParams(
            temperature=flags.temperature,
            top_p=flags.top_p,
            top_k=flags.top_k,
            min_p=flags.min_p,
            repetition_penalty=flags.repetition_penalty,
            seed=secrets.randbelow(MAX_SEED) if flags.seed is None else flags.seed,
            max_tokens=(
                self._booted.text_engine.max_model_len
                if flags.max_tokens is None
                else flags.max_tokens
            ),
        )
        request = GenerateRequest(
            request_id=f"cli-{self._num_asked}",
            prompt_tokens=tokens,
            params=params,
            stop=flags.stop,
            arrived_ns=Ns(time.monotonic_ns()),
            is_max_tokens_explicit=flags.max_tokens is not None,
        )
        return Answer(self._booted.text_engine, request)


@contextmanager
def answering(config: Config, sampling: SamplingFlags) -> Iterator[Answerer]:
    """Boot the model, with progress, and close it at the end."""
    with showing_progress() as report:
        booted = boot(config, on_progress=report)
    try:
        yield Answerer(booted, sampling)
    finally:
        booted.close()
