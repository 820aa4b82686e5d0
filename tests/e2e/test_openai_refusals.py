"""What the official client is told when a request is wrong, and what is let pass."""

from typing import Any
from uuid import UUID

import openai
import pytest

from support.client_calls import HELLO, PROMPT, chat, complete
from support.fake_engine import (
    MODEL_NAME,
)


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
        ({"extra_body": {"grammar": 'root ::= "a"'}}, "grammar", "not supported"),
        ({"extra_body": {"json_schema": {"type": "object"}}}, "json_schema", "not supported"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search", "not supported"),
        ({"extra_body": {"typical_p": 0.9}}, "typical_p", "not supported"),
        ({"extra_body": {"typical_p": 0}}, "typical_p", "not supported"),
        ({"extra_body": {"n_predict": 5}}, "n_predict", "not supported"),
        ({"extra_body": {"repeat_penalty": 1.1}}, "repeat_penalty", "not supported"),
        ({"extra_body": {"add_special_tokens": False}}, "add_special_tokens", "not supported"),
        ({"extra_body": {"max_completion_tokens": 5}}, "max_completion_tokens", "not supported"),
        ({"extra_body": {"max_tokens": "5"}}, "max_tokens", "str"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
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
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"echo": True}}, "echo"),
        ({"extra_body": {"add_special_tokens": True}}, "add_special_tokens"),
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
        modalities=["text"],
        extra_body={
            "functions": [],
            "guided_json": None,
            "use_beam_search": False,
            "length_penalty": 1.0,
            "typical_p": 1,
            "n_predict": -1,
            "mirostat": 0,
            "echo": False,
        },
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
    assert UUID(made.headers["x-request-id"]).version == 4
