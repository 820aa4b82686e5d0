"""The official client and every field that decides what is generated."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headrace.core.base.plan import SampleSpec
from headrace.live.generate import GenerateRequest, Offer
from support.client_calls import chat, complete
from support.fake_engine import (
    IM_END,
    FakeBooted,
    Formula,
    formula_model,
    saying,
)
from support.http_server import RunningServer, running_server

# ---- sampling


def test_a_seed_decides(client: openai.OpenAI) -> None:
    texts = [complete(client, seed=s, max_tokens=20).choices[0].text for s in (1, 1, 2, -1)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    assert len({complete(client, max_tokens=20).choices[0].text for _ in range(4)}) > 1


def test_greedy_answers_are_the_same(client: openai.OpenAI) -> None:
    answers = [complete(client, temperature=0, max_tokens=20).choices[0].text for _ in range(2)]
    assert answers[0] == answers[1]


def test_choices_differ(client: openai.OpenAI) -> None:
    answer = chat(client, n=4, max_tokens=20, seed=1)
    assert len({choice.message.content for choice in answer.choices}) == 4
    assert complete(client, n=2, best_of=2, max_tokens=1).usage.completion_tokens == 2


def test_logit_bias_decides(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=4, logit_bias={str(ord("z")): 100})
    assert answer.choices[0].text == "zzzz"


def test_every_sampling_field_reaches_the_engine(
    client: openai.OpenAI, server: RunningServer
) -> None:
    seen: list[Any] = []
    executor = server.booted.executor
    formula: Formula = executor.formula

    def spy(last: int, sample: SampleSpec) -> int:
        seen.append(sample.params)
        return formula(last, sample)

    executor.formula = spy
    try:
        complete(
            client,
            max_tokens=3,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.25,
            frequency_penalty=0.125,
            logit_bias={"5": -1},
            user="somebody",
            extra_body={
                "top_k": 7,
                "min_p": 0.1,
                "repetition_penalty": 1.5,
                "min_tokens": 2,
                "stop_token_ids": [9],
                "ignore_eos": True,
            },
        )
    finally:
        executor.formula = formula
    params = seen[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.25, 0.125)
    assert (params.repetition_penalty, params.min_tokens, params.max_tokens) == (1.5, 2, 3)
    assert params.stop_token_ids == (9,)
    assert params.logit_bias == ((5, -1.0),)
    assert params.ignore_eos is True


def test_priority_salt_and_slo_reach_the_engine(
    client: openai.OpenAI, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    stream = server.booted.text_engine.stream

    def spy(request: GenerateRequest, offer: Offer | None = None) -> Any:
        seen.append(request)
        return stream(request, offer)

    monkeypatch.setattr(server.booted.text_engine, "stream", spy)
    complete(
        client,
        max_tokens=1,
        extra_body={"priority": -3, "cache_salt": "tenant"},
        extra_headers={
            "x-slo-ttft-ms": "250",
            "x-slo-itl-ms": "20.5",
            "x-slo-e2e-ms": "1e3",
            "x-session-id": "of three turns",
        },
    )
    (request,) = seen
    assert (request.priority, request.salt) == (-3, "tenant")
    assert request.session == "of three turns"
    assert request.tenant
    assert "tenant" not in request.tenant
    assert (request.slo.ttft_ms, request.slo.itl_ms, request.slo.e2e_ms) == (250, 20.5, 1000)
    assert request.deadline_ns - request.arrived_ns == 600 * 10**9


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = "the same long beginning " * 10
    complete(client, prompt, max_tokens=1)
    usage = complete(client, prompt, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens >= len(prompt) - 16
    salted = complete(client, prompt, max_tokens=1, extra_body={"cache_salt": "other"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


# ---- ends


@pytest.fixture(scope="module")
def speaker() -> Iterator[tuple[openai.OpenAI, FakeBooted]]:
    """A model that says "one two three" after a prompt of 8 tokens, then ends."""
    with (
        formula_model(saying("one two three", 8)) as booted,
        running_server(booted) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, booted


def say(speaker: tuple[openai.OpenAI, FakeBooted], **fields: Any) -> Any:
    return complete(speaker[0], "12345678", **{"max_tokens": 50, **fields})


def test_the_end_of_text_ends(speaker: tuple[openai.OpenAI, FakeBooted]) -> None:
    choice = say(speaker).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (
        "one two three",
        "stop",
        None,
    )


def test_a_stop_string_ends_before_it(speaker: tuple[openai.OpenAI, FakeBooted]) -> None:
    choice = say(speaker, stop=["wo t", "zzz"]).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one t", "stop", "wo t")
    assert say(speaker, stop="two").choices[0].text == "one "
    included = say(speaker, stop="two", extra_body={"include_stop_str_in_output": True})
    assert included.choices[0].text == "one two"


def test_a_streamed_stop_string_never_shows(speaker: tuple[openai.OpenAI, FakeBooted]) -> None:
    chunks = [chunk.choices[0] for chunk in say(speaker, stop="two", stream=True)]
    assert "".join(chunk.text for chunk in chunks) == "one "
    assert chunks[-1].finish_reason == "stop"


def test_a_stop_token_ends(speaker: tuple[openai.OpenAI, FakeBooted]) -> None:
    choice = say(speaker, extra_body={"stop_token_ids": [ord("w")]}).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one t", "stop", ord("w"))


def test_eos_can_be_ignored_and_special_tokens_shown(
    speaker: tuple[openai.OpenAI, FakeBooted],
) -> None:
    choice = say(
        speaker, max_tokens=15, extra_body={"ignore_eos": True, "skip_special_tokens": False}
    ).choices[0]
    assert (choice.text, choice.finish_reason) == ("one two three<|im_end|><|im_end|>", "length")
    hidden = say(speaker, max_tokens=15, extra_body={"ignore_eos": True}).choices[0]
    assert hidden.text == "one two three"


def test_min_tokens_hold_off_the_end(speaker: tuple[openai.OpenAI, FakeBooted]) -> None:
    answer = say(speaker, max_tokens=20, extra_body={"min_tokens": 15, "return_token_ids": True})
    assert IM_END not in answer.choices[0].token_ids[:14]
    assert answer.usage.completion_tokens >= 15
