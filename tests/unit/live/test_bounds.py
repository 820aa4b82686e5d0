"""Every number of a request is bounded, and the error names the field as OpenAI does."""

import math
from typing import Any

import pytest

from headrace.core.base.errors import RequestError
from headrace.core.base.request import Slo
from headrace.core.base.sampling import SamplingParams
from headrace.live.bounds import check_request, check_text, resolve_params
from support.fake_engine import byte_tokenizer

VOCAB, CONTEXT = 100, 32


def resolve(
    prompt: tuple[int, ...] = (1, 2), *, is_max_tokens_explicit: bool = True, **params: Any
) -> SamplingParams:
    return resolve_params(
        prompt,
        SamplingParams(**params),
        is_max_tokens_explicit=is_max_tokens_explicit,
        max_model_len=CONTEXT,
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 2.0),
        ("top_p", 1e-6),
        ("top_p", 1.0),
        ("top_k", -1),
        ("top_k", 2**31 - 1),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 10.0),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 20),
        ("max_tokens", 1),
        ("max_tokens", CONTEXT - 2),
        ("min_tokens", 16),
        ("logit_bias", ((0, -100.0), (VOCAB - 1, 100.0))),
        ("logit_bias", ((0, 1.0),) * 1024),
        ("stop_token_ids", (0, VOCAB - 1)),
    ],
)
def test_what_is_within_bounds_passes(name: str, value: object) -> None:
    resolve(**dict[str, Any]({name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.01),
        ("temperature", 2.01),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", -math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 10.1),
        ("repetition_penalty", math.nan),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("max_tokens", 0),
        ("max_tokens", CONTEXT - 1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logit_bias", ((VOCAB, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 100.1),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 1.0),) * 1025),
        ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", (1,) * 1025),
    ],
)
def test_what_is_out_of_bounds_is_named(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(**dict[str, Any]({name: value}))
    assert caught.value.param == name
    assert caught.value.status_hint == 400


@pytest.mark.parametrize("prompt", [(), (VOCAB,), (-1,), (1,) * CONTEXT])
def test_a_prompt_must_be_one(prompt: tuple[int, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(prompt, max_tokens=1)
    assert caught.value.param == "prompt"


def test_the_error_says_what_would_fit() -> None:
    with pytest.raises(RequestError, match="at most 30 tokens") as caught:
        resolve(max_tokens=31)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="at most 31 tokens") as caught:
        resolve((1,) * 40, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_max_tokens_that_nobody_asked_for_are_cut_to_what_fits() -> None:
    assert resolve(max_tokens=1000, is_max_tokens_explicit=False).max_tokens == 30
    assert resolve(max_tokens=7, is_max_tokens_explicit=False).max_tokens == 7
    with pytest.raises(RequestError) as caught:
        resolve(max_tokens=1000, min_tokens=31, is_max_tokens_explicit=False)
    assert caught.value.param == "min_tokens"


def test_the_core_gets_its_own_spelling() -> None:
    assert resolve(top_k=VOCAB + 5).top_k == 0
    assert resolve(top_k=VOCAB - 1).top_k == VOCAB - 1
    params = resolve(seed=-1, top_k=-1)
    assert params.seed == 2**64 - 1
    assert params.top_k == 0


@pytest.mark.parametrize(("asked", "taken"), [(1e-310, 0.0), (9e-6, 0.0), (1e-5, 1e-5)])
def test_a_temperature_next_to_nothing_is_greedy(asked: float, taken: float) -> None:
    assert resolve(temperature=asked).temperature == taken


@pytest.mark.parametrize(("asked", "taken"), [(5e-324, 1e-5), (1e-5, 1e-5), (0.5, 0.5)])
def test_a_repetition_penalty_next_to_nothing_overflows_nothing(asked: float, taken: float) -> None:
    assert resolve(repetition_penalty=asked).repetition_penalty == taken


def test_the_request_as_a_whole_is_bounded() -> None:
    check_request(64, ("x" * 256,) * 16, -(2**31) + 1, Slo(ttft_ms=0, itl_ms=1e9))
    for n, stops, priority, slo, param in (
        (0, (), 0, Slo(), "n"),
        (65, (), 0, Slo(), "n"),
        (1, ("x",) * 17, 0, Slo(), "stop"),
        (1, ("",), 0, Slo(), "stop"),
        (1, ("x" * 257,), 0, Slo(), "stop"),
        (1, (), 2**31, Slo(), "priority"),
        (1, (), 0, Slo(ttft_ms=-1), "ttft_ms"),
        (1, (), 0, Slo(e2e_ms=math.nan), "e2e_ms"),
        (1, (), 0, Slo(tpot_ms=math.inf), "tpot_ms"),
    ):
        with pytest.raises(RequestError) as caught:
            check_request(n, stops, priority, slo)
        assert caught.value.param == param


def test_a_text_that_cannot_fit_is_not_tokenised() -> None:
    tokenizer, context = byte_tokenizer(), 1000  # its longest piece has 12 bytes
    check_text(tokenizer, "x" * 12 * (context - 1), context)
    with pytest.raises(RequestError, match=f"at least {context} tokens") as caught:
        check_text(tokenizer, "x" * (12 * (context - 1) + 1), context)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
