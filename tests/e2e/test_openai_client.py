"""The official client and every parameter, over real HTTP, on a model whose answers are known."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headrace.core.base.plan import SampleSpec
from headrace.live.generate import GenerateRequest
from support.fake_engine import (
    IM_END,
    MODEL_NAME,
    FakeBooted,
    Formula,
    formula_model,
    saying,
)
from support.http_server import RunningServer, running_server

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with formula_model() as booted, running_server(booted) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(model=MODEL_NAME, prompt=prompt, **fields)


def chat(client: openai.OpenAI, messages: Any = HELLO, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL_NAME, messages=messages, **fields)


# ---- models


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).object == "model"


@pytest.mark.parametrize("route", ["models", "chat", "completions"])
def test_an_unknown_model_is_not_found(client: openai.OpenAI, route: str) -> None:
    calls: dict[str, Any] = {
        "models": lambda: client.models.retrieve("org/other"),
        "chat": lambda: client.chat.completions.create(model="org/other", messages=HELLO),
        "completions": lambda: client.completions.create(model="org/other", prompt="x"),
    }
    with pytest.raises(openai.NotFoundError) as caught:
        calls[route]()
    assert caught.value.code == "model_not_found"
    assert "org/other" in caught.value.message


# ---- chat


def test_a_chat_answer_is_complete(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=7)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL_NAME
    assert answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert len(choice.message.content) == 7
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_a_chat_stream_is_framed_as_openai_frames_it(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(chat(client, max_tokens=5, n=2, seed=3, stream=True, stream_options=options))
    whole = chat(client, max_tokens=5, n=2, seed=3)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[0].delta.content == ""
        assert [one.delta.role for one in mine[1:]] == [None] * (len(mine) - 1)
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + ["length"]
        text = "".join(one.delta.content or "" for one in mine)
        assert text == whole.choices[index].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_usage_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, max_tokens=4, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] <= 1
    assert counts[-1] == 4


def test_a_chat_has_no_default_limit_but_the_context(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 2048


def test_max_completion_tokens_goes_before_max_tokens(client: openai.OpenAI) -> None:
    assert chat(client, max_completion_tokens=3).usage.completion_tokens == 3
    assert chat(client, max_completion_tokens=3, max_tokens=9).usage.completion_tokens == 3


def test_all_roles_and_text_parts_reach_the_template(
    client: openai.OpenAI, server: RunningServer
) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    answer = chat(client, messages, max_tokens=1, extra_body={"return_token_ids": True})
    text = server.booted.loaded.tokenizer.decode(answer.prompt_token_ids, skip_special=False)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def prompt_of(client: openai.OpenAI, server: RunningServer, messages: Any, **extra: Any) -> str:
    body = {"return_token_ids": True, **extra}
    answer = chat(client, messages, max_tokens=1, extra_body=body)
    text: str = server.booted.loaded.tokenizer.decode(answer.prompt_token_ids, skip_special=False)
    return text


def test_the_generation_prompt_can_be_left_out(
    client: openai.OpenAI, server: RunningServer
) -> None:
    text = prompt_of(client, server, HELLO, add_generation_prompt=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"


def test_the_final_message_can_be_continued(client: openai.OpenAI, server: RunningServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    text = prompt_of(client, server, messages, continue_final_message=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nSure, "


def test_template_arguments_reach_the_template(
    client: openai.OpenAI, server: RunningServer
) -> None:
    text = prompt_of(client, server, HELLO, chat_template_kwargs={"shout": "LOUD"})
    assert "LOUD<|im_start|>assistant" in text


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=3, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(one.token for one in content) == answer.choices[0].message.content
    for one in content:
        assert one.bytes == list(one.token.encode())
        assert one.logprob == -1.0
        assert [top.logprob for top in one.top_logprobs] == [-0.5, -1.0]
        assert one.top_logprobs[1].token == one.token
    streamed = chat(client, max_tokens=3, logprobs=True, seed=1, stream=True)
    tokens = [
        one.token
        for chunk in streamed
        if chunk.choices and chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    again = chat(client, max_tokens=3, logprobs=True, seed=1)
    assert tokens == [one.token for one in again.choices[0].logprobs.content]


def test_chat_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=1, extra_body={"prompt_logprobs": 1, "return_token_ids": True})
    shown, ids = answer.prompt_logprobs, answer.prompt_token_ids
    assert shown[0] is None
    assert len(shown) == len(ids)
    for entry, token_id in zip(shown[1:], ids[1:], strict=True):
        assert entry[str(token_id)]["rank"] == 2
        assert entry[str(token_id)]["logprob"] == -1.0
        assert [one["rank"] for one in entry.values()] == [1, 2]


# ---- completions


def test_a_completion_is_complete(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.completion_tokens == 16  # OpenAI's default
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert len(answer.choices[0].text) == 16


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [
        ("ab", 1),
        (["ab"], 1),
        (["ab", "cd", "ef"], 3),
        ([97, 98], 1),
        ([[97, 98], [99, 100]], 2),
    ],
)
def test_every_form_of_prompt(client: openai.OpenAI, prompt: Any, num_prompts: int) -> None:
    answer = complete(client, prompt, max_tokens=2, temperature=0)
    assert answer.usage.prompt_tokens == 2 * num_prompts
    assert answer.usage.completion_tokens == 2 * num_prompts
    assert (
        answer.choices[0].text
        == complete(client, "ab", max_tokens=2, temperature=0).choices[0].text
    )


def test_choices_of_several_prompts_are_numbered_on(client: openai.OpenAI) -> None:
    prompts = ["ab", "cd", "ef"]
    answer = complete(client, prompts, n=2, max_tokens=6, seed=5)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, prompt in enumerate(prompts):
        alone = complete(client, prompt, n=2, max_tokens=6, seed=5)
        mine = answer.choices[2 * index : 2 * index + 2]
        assert [one.text for one in mine] == [one.text for one in alone.choices]


def test_streamed_completions_of_several_prompts(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    fields: dict[str, Any] = {"n": 2, "max_tokens": 5, "seed": 5}
    chunks = list(complete(client, ["ab", "cd"], stream=True, stream_options=options, **fields))
    whole = complete(client, ["ab", "cd"], **fields)
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    finished = [c.choices[0].index for c in chunks[:-1] if c.choices[0].finish_reason]
    assert sorted(finished) == [0, 1, 2, 3]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens == 4


def test_echo_shows_the_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, echo=True, max_tokens=3)
    assert answer.choices[0].text.startswith(PROMPT)
    assert len(answer.choices[0].text) == len(PROMPT) + 3
    streamed = complete(client, echo=True, max_tokens=3, stream=True)
    assert next(iter(streamed)).choices[0].text == PROMPT


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, "héllo", echo=True, logprobs=2, max_tokens=2)
    shown = answer.choices[0].logprobs
    assert shown.tokens[:4] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l"]
    assert shown.token_logprobs == [None] + [-1.0] * 7
    assert shown.top_logprobs[0] is None
    assert shown.top_logprobs[3] == {"m": -0.5, "l": -1.0}
    assert shown.text_offset == [0, 1, 1, 2, 3, 4, 5, 6]
    streamed = complete(client, "héllo", echo=True, logprobs=2, max_tokens=2, stream=True)
    tokens = [t for c in streamed if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert len(tokens) == 8


def test_a_prompt_can_be_scored_without_output(client: openai.OpenAI) -> None:
    answer = complete(client, "abc", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0


def test_completion_logprobs_without_echo(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=1, max_tokens=3)
    shown = answer.choices[0].logprobs
    assert "".join(shown.tokens) == answer.choices[0].text
    assert shown.text_offset == [len(PROMPT) + i for i in range(3)]
    # The chosen token is shown even where it is not among the likeliest.
    assert all(token in top for token, top in zip(shown.tokens, shown.top_logprobs, strict=True))
    assert [len(top) for top in shown.top_logprobs] == [2, 2, 2]
    assert complete(client, max_tokens=1).choices[0].logprobs is None
    assert complete(client, max_tokens=1, logprobs=0).choices[0].logprobs is not None


def test_token_ids_are_returned(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=3, extra_body={"return_token_ids": True})
    assert bytes(answer.choices[0].token_ids).decode() == answer.choices[0].text
    assert bytes(answer.choices[0].prompt_token_ids).decode() == PROMPT
    streamed = complete(client, max_tokens=3, stream=True, extra_body={"return_token_ids": True})
    chunks = [chunk.choices[0] for chunk in streamed]
    assert bytes(chunks[0].prompt_token_ids).decode() == PROMPT
    assert sum(len(getattr(c, "token_ids", None) or []) for c in chunks) == 3


def test_completion_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = complete(client, "abc", max_tokens=1, extra_body={"prompt_logprobs": 0})
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None
    assert [list(entry) for entry in rest] == [["98"], ["99"]]


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

    def spy(request: GenerateRequest) -> Any:
        seen.append(request)
        return stream(request)

    monkeypatch.setattr(server.booted.text_engine, "stream", spy)
    complete(
        client,
        max_tokens=1,
        extra_body={"priority": -3, "cache_salt": "tenant"},
        extra_headers={"x-slo-ttft-ms": "250", "x-slo-itl-ms": "20.5", "x-slo-e2e-ms": "1e3"},
    )
    (request,) = seen
    assert (request.priority, request.salt) == (-3, "tenant")
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


# ---- async


def test_many_at_once_get_what_they_would_get_alone(server: RunningServer) -> None:
    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            together = await asyncio.gather(*(_streamed(client, seed) for seed in range(24)))
            alone = [await _whole(client, seed) for seed in range(24)]
        return together, alone

    together, alone = asyncio.run(run())
    assert together == alone


async def _streamed(client: openai.AsyncOpenAI, seed: int) -> str:
    chunks = await client.chat.completions.create(
        model=MODEL_NAME, messages=HELLO, max_tokens=12, seed=seed, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def _whole(client: openai.AsyncOpenAI, seed: int) -> str:
    answer = await client.chat.completions.create(
        model=MODEL_NAME, messages=HELLO, max_tokens=12, seed=seed
    )
    return answer.choices[0].message.content or ""


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"temperature": -1}, "temperature", "-1"),
        ({"temperature": 2.5}, "temperature", "2"),
        ({"top_p": 0}, "top_p", "1"),
        ({"n": 65}, "n", "64"),
        ({"n": 0}, "n", "0"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": -1}, "logprobs", "-1"),
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 5000}, "max_tokens", "2048"),
        ({"seed": 2**65}, "seed", str(2**65)),
        ({"presence_penalty": 3}, "presence_penalty", "2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-2"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "a"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "257"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [1, "a"]}, "prompt", "mixes"),
        ({"prompt": [300]}, "prompt", "257"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [10**30]}, "prompt", "257"),
        ({"prompt": "x" * 3000}, "prompt", "2048"),
        ({"extra_body": {"top_k": -2}}, "top_k", "-2"),
        ({"extra_body": {"min_p": 1.5}}, "min_p", "1"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty", "0"),
        ({"extra_body": {"min_tokens": 100}}, "min_tokens", "16"),
        ({"extra_body": {"stop_token_ids": [258]}}, "stop_token_ids", "257"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs", "20"),
        ({"extra_body": {"cache_salt": "x" * 300}}, "cache_salt", "256"),
        ({"extra_body": {"priority": 2**80}}, "priority", str(2**80)),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json", "not supported"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search", "not supported"),
        ({"extra_body": {"max_tokens": "5"}}, "max_tokens", "str"),
        ({"extra_body": {"max_tokens": True}}, "max_tokens", "bool"),
        ({"extra_headers": {"x-slo-ttft-ms": "soon"}}, "x-slo-ttft-ms", "soon"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_completion_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, word: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **{"prompt": PROMPT, **fields})
    error: Any = caught.value.body
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert word in error["message"]
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        (
            {"extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
            "continue_final_message",
        ),
        ({"extra_body": {"chat_template_kwargs": {"messages": "x"}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"x": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"__x": 1}}}, "chat_template_kwargs"),
        (
            {"extra_body": {"chat_template_kwargs": {f"x{i}": 1 for i in range(17)}}},
            "chat_template_kwargs",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_chat_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **{"messages": HELLO, **fields})
    error: Any = caught.value.body
    assert error["param"] == param


def test_what_changes_nothing_is_accepted(client: openai.OpenAI) -> None:
    answer = chat(
        client,
        max_tokens=1,
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
        response_format={"type": "text"},
        extra_body={"functions": [], "guided_json": None, "use_beam_search": False},
    )
    assert answer.usage.completion_tokens == 1


def test_unknown_fields_are_ignored_and_named(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL_NAME,
        messages=HELLO,
        max_tokens=1,
        store=True,
        extra_body={"zeta": 1, "we\r\nird": 2},
    )
    assert raw.headers["x-ignored-fields"] == "store, zeta"


def test_request_ids_are_echoed_or_made(client: openai.OpenAI) -> None:
    create = client.completions.with_raw_response.create
    given = create(
        model=MODEL_NAME, prompt="x", max_tokens=1, extra_headers={"x-request-id": "abc-1"}
    )
    assert given.headers["x-request-id"] == "abc-1"
    made = create(
        model=MODEL_NAME, prompt="x", max_tokens=1, extra_headers={"x-request-id": "no spaces"}
    )
    assert made.headers["x-request-id"].startswith("req-")
