"""headrace as a library: `LLM().generate(prompts)`, in this process, with the engine that also
serves.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, count
from types import TracebackType
from typing import Any, TypedDict, Unpack, cast
from weakref import finalize

from headrace.core.base.errors import DeviceError, InvariantError, RequestError
from headrace.core.base.plan import TokenLogprob
from headrace.core.base.request import FinishReason
from headrace.core.base.sampling import SamplingParams
from headrace.core.config.merge import Layer, did_you_mean, merge
from headrace.core.config.schema import Config
from headrace.core.config.settings import SETTINGS
from headrace.live.boot import Booted, Progress, boot
from headrace.live.choice import ChoiceDelta
from headrace.live.generate import GenerateRequest
from headrace.live.prompts import encode_chat, encode_text

Message = Mapping[str, Any]
"""A chat message: {"role": "user", "content": "…"}."""

Prompt = str | Sequence[int]
"""A text, or its token ids."""


# Choices of one call under way at once; those behind them wait here instead of in the engine's
# queue.
OPEN_CHOICES = 512
# A setting has the name of its flag.
_SETTINGS = {setting.flag[2:].replace("-", "_"): setting for setting in SETTINGS.values()}
_REQUEST_OPTIONS = frozenset({"include_stop", "skip_special_tokens"})


class Sampling(TypedDict, total=False):
    """How tokens are chosen and when they end; names and bounds are those of the OpenAI API and
    vLLM.
    """

    max_tokens: int | None  # None = until the model ends, or its context is full
    min_tokens: int
    temperature: float  # 0 = greedy
    top_p: float
    top_k: int
    min_p: float
    seed: int | None  # None = another one each time
    n: int  # choices for each prompt
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None  # alternatives beside each chosen token
    prompt_logprobs: int | None
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice of a completion."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length", "cancelled" or "deadline"
    stop_reason: str | int | None = (
        None  # the stop string or stop token id; None for the model's own end
    )
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of token_ids, where asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of one prompt."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int  # prompt tokens whose KV was found, by the first choice
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of prompt tokens 1, 2, …, where asked


class LLM:
    """A model in this process.

    `model` is a GGUF file, a safetensors folder or a hub id; empty = the default model, fetched on
    first use. Settings have the names of the flags of `headrace serve` (`max_model_len=2048`,
    `threads=4`, `kv_dtype="int8"`, …). Raises ConfigError for what the machine or the model cannot
    do.

    Thread-safe. The engine's memory and threads are given back by `close`, at the end of a `with`,
    when the object is collected, or at exit.
    """

    def __init__(
        self, model: str = "", *, on_progress: Progress | None = None, **settings: Any
    ) -> None:
        self._booted = boot(_config(model, settings), on_progress=on_progress)
        self._finalizer = finalize(self, self._booted.close)
        self._request_ids = count()

    @property
    def booted(self) -> Booted:
        """The parts: engine, text engine, loaded model, byte ledger."""
        return self._booted

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Completion]:
        """Complete one or many prompts, batched as the engine sees fit; results are in the order of
        the prompts.

        16 tokens each unless `max_tokens` says otherwise. `on_progress(done, all)` is called as
        prompts finish. Raises RequestError, naming the field, before anything runs where a number
        is out of bounds.
        """
        sampling.setdefault("max_tokens", 16)
        many = _as_many(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        return self._complete(
            texts, [self._tokens(prompt) for prompt in many], sampling, on_progress
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Completion]:
        """Answer one or many conversations; until the answer ends unless `max_tokens` says
        otherwise.
        """
        prompts = [self._render(conversation) for conversation in _as_conversations(messages)]
        texts, tokens = [text for text, _ in prompts], [tokens for _, tokens in prompts]
        return self._complete(texts, tokens, sampling, on_progress)

    def stream(
        self, prompt: Prompt | Sequence[Message], **sampling: Unpack[Sampling]
    ) -> Iterator[str]:
        """The text of one completion, or of the answer to one conversation, as it comes.

        Until the text ends unless `max_tokens` says otherwise. Closing the iterator ends the work.
        """
        if sampling.get("n", 1) != 1:
            raise RequestError("a stream of text has one choice", param="n", hint="use generate")
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            tokens = self._tokens(cast(Prompt, prompt))
        else:
            _, tokens = self._render(cast("Sequence[Message]", prompt))
        request = self._request(tokens, sampling)
        with closing(self._booted.text_engine.stream_sync(request)) as deltas:
            for delta in deltas:
                if delta.text:
                    yield delta.text
                _raise_error(delta)

    def close(self) -> None:
        """End what runs and give back memory and threads. Idempotent."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- prompts

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        engine = self._booted.text_engine
        return encode_text(engine.tokenizer, prompt, engine.max_model_len)

    def _render(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        template = self._booted.chat_template
        if template is None:
            raise RequestError(
                "the model has no chat template",
                code="no_chat_template",
                hint="use generate, or name a template with the setting `chat_template`",
            )
        engine = self._booted.text_engine
        given = [dict(message) for message in messages]
        return encode_chat(template, engine.tokenizer, given, engine.max_model_len)

    # ---- requests

    def _request(self, tokens: Sequence[int], sampling: Sampling) -> GenerateRequest:
        options: dict[str, Any] = dict(sampling)
        unknown = options.keys() - Sampling.__annotations__.keys()
        if unknown:
            names, known = ", ".join(sorted(unknown)), ", ".join(Sampling.__annotations__)
            raise TypeError(f"unknown sampling options: {names}; there are {known}")
        n = options.pop("n", 1)
        stop = options.pop("stop", ())
        max_tokens = options.pop("max_tokens", None)
        own = {name: options.pop(name) for name in _REQUEST_OPTIONS & options.keys()}
        if options.get("seed") is None:
            options["seed"] = secrets.randbits(64)
        if "logit_bias" in options:
            options["logit_bias"] = tuple(sampling["logit_bias"].items())
        if "stop_token_ids" in options:
            options["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        room = self._booted.text_engine.max_model_len
        return GenerateRequest(
            request_id=f"llm-{next(self._request_ids)}",
            prompt_tokens=tokens,
            params=SamplingParams(max_tokens=room if max_tokens is None else max_tokens, **options),
            is_max_tokens_explicit=max_tokens is not None,
            n=n,
            stop=(stop,) if isinstance(stop, str) else stop,
            **own,
        )

    def _complete(
        self,
        texts: Sequence[str | None],
        tokens: Sequence[Sequence[int]],
        sampling: Sampling,
        on_progress: Callable[[int, int], None] | None,
    ) -> list[Completion]:
        requests = [self._request(prompt, sampling) for prompt in tokens]
        deltas: list[list[ChoiceDelta]] = [[] for _ in requests]
        num_done, num_all = 0, sum(request.n for request in requests)
        max_open = max(1, OPEN_CHOICES // max((request.n for request in requests), default=1))
        stream = self._booted.text_engine.stream_all(requests, max_open=max_open)
        with closing(stream):
            for index, delta in stream:
                _raise_error(delta)
                deltas[index].append(delta)
                if delta.finish is not None:
                    num_done += 1
                    if on_progress is not None:
                        on_progress(num_done, num_all)
        return [
            _completion(text, request, parts)
            for text, request, parts in zip(texts, requests, deltas, strict=True)
        ]


def _config(model: str, settings: Mapping[str, object]) -> Config:
    values: dict[str, Any] = {}
    faults = []
    for name, value in {"model": model, **settings}.items():
        setting = _SETTINGS.get(name)
        if setting is None:
            faults.append(f"unknown setting {name} (LLM){did_you_mean(name, list(_SETTINGS))}")
        else:
            values.setdefault(setting.section, {})[setting.name] = value
    return merge([Layer("LLM", values, faults)]).config


def _completion(
    text: str | None, request: GenerateRequest, deltas: Sequence[ChoiceDelta]
) -> Completion:
    outputs = [_output([delta for delta in deltas if delta.index == i]) for i in range(request.n)]
    first = [delta for delta in deltas if delta.index == 0]
    finish = first[-1].finish
    return Completion(
        prompt=text,
        prompt_token_ids=tuple(request.prompt_tokens),
        outputs=tuple(outputs),
        num_cached_tokens=0 if finish is None else finish.num_cached_tokens,
        prompt_logprobs=tuple(chain.from_iterable(delta.prompt_logprobs for delta in first)),
    )


def _output(deltas: Sequence[ChoiceDelta]) -> CompletionOutput:
    finish = deltas[-1].finish
    if finish is None:
        raise InvariantError("a stream ended without its finish", index=deltas[-1].index)
    return CompletionOutput(
        index=deltas[-1].index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        finish_reason=finish.reason.value,
        stop_reason=finish.stop_reason,
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
    )


def _raise_error(delta: ChoiceDelta) -> None:
    if delta.finish is not None and delta.finish.reason is FinishReason.ERROR:
        raise DeviceError(delta.finish.error)


def _as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text and a list of token ids are one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))
