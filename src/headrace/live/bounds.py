"""The bounds of every number in a request. The core trusts what has passed here."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from headrace.core.base.errors import RequestError
from headrace.core.base.request import Slo
from headrace.core.base.sampling import SamplingParams
from headrace.models.text.tokenizer import Tokenizer

MAX_CHOICES: Final = 64
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_SLO_MS: Final = 1e9
QUICK_CHARS: Final = 8192  # a text up to this is tokenised as soon as it is looked at
MIN_TEMPERATURE: Final = 1e-5  # below it a draw is the likeliest token anyway
MIN_REPETITION_PENALTY: Final = 1e-5  # what lies below it overflows at last
MAX_PRIORITY: Final = 2**31 - 1
MAX_TOP_K: Final = 2**31 - 1  # more than any vocabulary has means all of it


def resolve_params(
    prompt_tokens: tuple[int, ...],
    params: SamplingParams,
    *,
    is_max_tokens_explicit: bool,
    max_model_len: int,
    vocab_size: int,
) -> SamplingParams:
    """The parameters as the core takes them: within bounds, seed unsigned, max_tokens no more than
    fits.

    Raises RequestError whose `param` is OpenAI's name of the offending field.
    """
    _check_prompt(prompt_tokens, max_model_len, vocab_size)
    _check_sampling(params, vocab_size)
    num_prompt, room = len(prompt_tokens), max_model_len - len(prompt_tokens)
    _check("max_tokens", params.max_tokens, 1, math.inf)
    if params.max_tokens > room and is_max_tokens_explicit:
        raise RequestError(
            f"prompt of {num_prompt} tokens and max_tokens of {params.max_tokens} exceed the"
            f" model's {max_model_len} tokens",
            code="context_length_exceeded",
            param="max_tokens",
            hint=f"ask for at most {room} tokens, or shorten the prompt",
        )
    max_tokens = min(params.max_tokens, room)
    _check("min_tokens", params.min_tokens, 0, max_tokens)
    return msgspec.structs.replace(
        params,
        temperature=params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0,
        max_tokens=max_tokens,
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        repetition_penalty=max(params.repetition_penalty, MIN_REPETITION_PENALTY),
        seed=params.seed % 2**64,
    )


def check_request(n: int, stops: tuple[str, ...], priority: int, slo: Slo) -> None:
    """Raise RequestError unless what is asked of the request as a whole is within bounds."""
    _check("n", n, 1, MAX_CHOICES)
    _check("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
    for name in slo.__struct_fields__:
        limit_ms = getattr(slo, name)
        if limit_ms is not None:
            _check(name, limit_ms, 0, MAX_SLO_MS)
    if len(stops) > MAX_STOPS:
        raise _fault("stop", f"{len(stops)} stop strings are more than {MAX_STOPS}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _fault(
                "stop", f"a stop string of {len(stop)} characters is not within 1..{MAX_STOP_CHARS}"
            )


def check_text(tokenizer: Tokenizer, text: str, max_model_len: int) -> None:
    """Raise RequestError for a text that is too long for a prompt however it is tokenised."""
    if len(text) > QUICK_CHARS:
        least = tokenizer.least_tokens(text)
        if least >= max_model_len:
            raise _no_room(f"at least {least}", max_model_len)


def check_length(tokens: Sequence[int], max_model_len: int) -> None:
    """Raise RequestError for a prompt that leaves no room for an answer."""
    if len(tokens) >= max_model_len:
        raise _no_room(str(len(tokens)), max_model_len)


def _no_room(num_tokens: str, max_model_len: int) -> RequestError:
    return RequestError(
        f"prompt of {num_tokens} tokens leaves no room within the model's {max_model_len}",
        code="context_length_exceeded",
        param="prompt",
        hint=f"shorten the prompt to at most {max_model_len - 1} tokens",
    )


def _check_prompt(tokens: tuple[int, ...], max_model_len: int, vocab_size: int) -> None:
    if not tokens:
        raise _fault("prompt", "prompt has no tokens")
    # The length first: looking at each id of an endless prompt takes as long.
    check_length(tokens, max_model_len)
    _check_ids("prompt", tokens, vocab_size)


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    _check("temperature", params.temperature, 0, 2)
    if not 0 < params.top_p <= 1:
        raise _fault("top_p", f"top_p of {params.top_p} is not above 0 and at most 1")
    _check("top_k", params.top_k, -1, MAX_TOP_K)
    _check("min_p", params.min_p, 0, 1)
    _check("presence_penalty", params.presence_penalty, -2, 2)
    _check("frequency_penalty", params.frequency_penalty, -2, 2)
    if not 0 < params.repetition_penalty <= 10:
        raise _fault(
            "repetition_penalty",
            f"repetition_penalty of {params.repetition_penalty} is not above 0 and at most 10",
        )
    _check("seed", params.seed, -(2**63), 2**64 - 1)
    for name in ("logprobs", "prompt_logprobs"):
        num_top = getattr(params, name)
        if num_top is not None:
            _check(name, num_top, 0, min(MAX_LOGPROBS, vocab_size))
    _check_count("logit_bias", len(params.logit_bias), MAX_LOGIT_BIASES)
    _check_ids("logit_bias", (token for token, _ in params.logit_bias), vocab_size)
    for _, bias in params.logit_bias:
        _check("logit_bias", bias, -100, 100)
    _check_count("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check(param: str, value: float, low: float, high: float) -> None:
    # Written so that a NaN, which compares false with everything, is refused.
    if not low <= value <= high:
        limits = f"within {low}..{high}" if high < math.inf else f"at least {low}"
        raise _fault(param, f"{param} of {value} is not {limits}")


def _check_count(param: str, count: int, limit: int) -> None:
    if count > limit:
        raise _fault(param, f"{param} has {count} entries, the limit is {limit}")


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise _fault(param, f"token id {token} is not within 0..{vocab_size - 1}")


def _fault(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
