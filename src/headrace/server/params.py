"""From a typed body to what the text engine is asked.

Decides defaults, and the limits that are the server's own; the bounds of sampling numbers are the
text engine's.
"""

import math
import os
import re
from collections.abc import Mapping

from headrace.core.base.errors import RequestError
from headrace.core.base.request import Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.config.schema import ServerConfig
from headrace.live.bounds import MAX_PRIORITY
from headrace.server.errors import unsupported
from headrace.server.wire import ChatRequest, CompletionRequest, GenerationRequest

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat may fill the context

MAX_SALT_CHARS = 256
MAX_SLO_MS = 1e9

_NO_LIMITS = Slo()
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def too_much(
    param: str, value: object, limit: object, *, what: str = "is too large"
) -> RequestError:
    return RequestError(
        f"`{param}` {what}", code="invalid_value", param=param, value=value, limit=limit
    )


def check_common(request: GenerationRequest, num_prompts: int, config: ServerConfig) -> None:
    """The server's own limits, and what OpenAI or vLLM know and this server does not."""
    n = num_choices(request)
    if n < 1:
        raise too_much("n", n, 1, what="is too small")
    if num_prompts * n > config.max_n:
        raise too_much("n", num_prompts * n, config.max_n, what="times the prompts is too large")
    if request.best_of not in (None, n):
        raise unsupported("best_of", f"`best_of` ({request.best_of}) other than `n` ({n})")
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "`stream_options` is only allowed when `stream` is true",
            code="invalid_value",
            param="stream_options",
        )
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported(
            "response_format", f'response_format "{request.response_format.type[:64]}"'
        )
    if request.stream and request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "`prompt_logprobs` with `stream`")
    _check_count("prompt_logprobs", request.prompt_logprobs, config.max_logprobs)
    if request.priority is not None and abs(request.priority) > MAX_PRIORITY:
        raise too_much("priority", request.priority, MAX_PRIORITY, what="is out of range")
    if len(request.cache_salt or "") > MAX_SALT_CHARS:
        raise too_much(
            "cache_salt", len(request.cache_salt or ""), MAX_SALT_CHARS, what="is too long"
        )


def check_chat(request: ChatRequest, config: ServerConfig) -> None:
    if request.tools and request.tool_choice != "none":
        raise unsupported("tools", "`tools`")
    if request.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "`tool_choice` other than none")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError(
            "`top_logprobs` is only allowed when `logprobs` is true",
            code="invalid_value",
            param="top_logprobs",
        )
    _check_count("top_logprobs", request.top_logprobs, config.max_logprobs)
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            "`continue_final_message` and `add_generation_prompt` exclude each other",
            code="invalid_value",
            param="continue_final_message",
        )


def check_completion(request: CompletionRequest, config: ServerConfig) -> None:
    if request.suffix:
        raise unsupported("suffix", "`suffix`")
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise RequestError(
            "`max_tokens` of 0 asks for nothing",
            code="invalid_value",
            param="max_tokens",
            hint="`echo` or `prompt_logprobs` scores the prompt; or ask for at least 1",
        )
    _check_count("logprobs", request.logprobs, config.max_logprobs)


def num_choices(request: GenerationRequest) -> int:
    return 1 if request.n is None else request.n


def stops(request: GenerationRequest) -> tuple[str, ...]:
    given = request.stop
    listed = [given] if isinstance(given, str) else (given or [])
    return tuple(text for text in listed if text)


def sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Absent fields take the defaults of SamplingParams; an absent seed is drawn from the system's
    entropy.
    """
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_tokens",
            "ignore_eos",
        )
        if (value := getattr(request, name)) is not None
    }
    return SamplingParams(
        **given,
        seed=random_seed() if request.seed is None else request.seed,
        logit_bias=_logit_bias(request.logit_bias or {}),
        max_tokens=max_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def chat_logprobs(request: ChatRequest) -> int | None:
    return (request.top_logprobs or 0) if request.logprobs else None


def random_seed() -> int:
    """63 bits of the system's entropy: what a request gets that names no seed."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def completion_prompt_logprobs(request: CompletionRequest) -> int | None:
    """An echoed prompt shows as many alternatives as the output."""
    counts = [request.prompt_logprobs, request.logprobs if request.echo else None]
    return max((count for count in counts if count is not None), default=None)


def slo_of(headers: Mapping[str, str]) -> Slo:
    """The limits that the client states in `x-slo-*-ms` headers."""
    if not any(name.startswith("x-slo-") for name in headers):
        return _NO_LIMITS
    return Slo(
        ttft_ms=_slo_ms(headers, "x-slo-ttft-ms"),
        itl_ms=_slo_ms(headers, "x-slo-itl-ms"),
        tpot_ms=_slo_ms(headers, "x-slo-tpot-ms"),
        e2e_ms=_slo_ms(headers, "x-slo-e2e-ms"),
    )


def _slo_ms(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SLO_MS:
        raise RequestError(
            f"header `{name}` must be a number of milliseconds",
            code="invalid_value",
            param=name,
            got=text[:32],
            limit=MAX_SLO_MS,
        )
    return value


def _check_count(param: str, value: int | None, limit: int) -> None:
    if value is not None and not 0 <= value <= limit:
        raise too_much(param, value, limit, what="is out of range")


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(
                "`logit_bias` has a key that is not a token id",
                code="invalid_value",
                param="logit_bias",
                key=key[:32],
            )
    return tuple(sorted({int(key): bias for key, bias in given.items()}.items()))
