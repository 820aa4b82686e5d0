"""Every field of the official client, asked in four ways: whole and streamed, plain and async. Each
way brings the same request to the engine, and the same answer back.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import openai
import pytest

from headrace.core.base.types import Ns
from headrace.live.generate import GenerateRequest, Offer
from support.client_calls import HELLO, PROMPT
from support.fake_engine import MODEL_NAME
from support.http_server import RunningServer

Answer = dict[int, tuple[str, str | None]]  # by choice: its text, and why it ended

FIELDS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 2},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"extra_body": {"top_k": 3}},
    "min_p": {"extra_body": {"min_p": 0.2}},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "repetition_penalty": {"extra_body": {"repetition_penalty": 1.5}},
    "logit_bias": {"logit_bias": {"122": 100}},
    "stop": {"stop": ["e", "o"]},
    "stop_token_ids": {"extra_body": {"stop_token_ids": [ord("e"), ord("a")]}},
    "include_stop": {"stop": "e", "extra_body": {"include_stop_str_in_output": True}},
    "skip_special_tokens": {"extra_body": {"skip_special_tokens": False}},
    "max_tokens": {"max_tokens": 3},
    "min_tokens": {"extra_body": {"min_tokens": 5}},
    "ignore_eos": {"extra_body": {"ignore_eos": True}},
    "n": {"n": 3},
    "priority": {"extra_body": {"priority": 2}},
    "cache_salt": {"extra_body": {"cache_salt": "tenant"}},
    "prompt_cache_key": {"extra_body": {"prompt_cache_key": "k"}},
    "user": {"user": "u"},
    "session": {"user": "u", "extra_headers": {"x-session-id": "s"}},
    "slo": {"extra_headers": {"x-slo-ttft-ms": "250"}},
}
OF_COMPLETIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "echo and logprobs": {"echo": True, "logprobs": 1},
    "several prompts": {"prompt": ["a", "bc"], "n": 2},
    "token ids": {"prompt": [1, 2, 3]},
}
OF_CHATS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "max_completion_tokens": {"max_completion_tokens": 4},
    "add_generation_prompt": {"extra_body": {"add_generation_prompt": False}},
}
CASES = [
    pytest.param(is_chat, fields, id=f"{'chat' if is_chat else 'completion'}: {name}")
    for is_chat, own in ((False, OF_COMPLETIONS), (True, OF_CHATS))
    for name, fields in (FIELDS | own).items()
]
# What reaches the engine is the same without them: they say how the answer is shown.
SHOWN_ONLY = ("echo",)


def create_of(client: Any, is_chat: bool) -> Callable[..., Any]:
    create: Callable[..., Any] = (client.chat if is_chat else client).completions.create
    return create


def collect(choices: Iterable[Any]) -> Answer:
    answer: Answer = {}
    for choice in choices:
        text, reason = answer.get(choice.index, ("", None))
        part = getattr(choice, "delta", None) or getattr(choice, "message", None)
        new = (part.content if part is not None else choice.text) or ""
        answer[choice.index] = (text + new, choice.finish_reason or reason)
    return answer


def plain(client: openai.OpenAI, is_chat: bool, fields: dict[str, Any]) -> tuple[Answer, Answer]:
    """(whole, streamed)."""
    create = create_of(client, is_chat)
    whole = collect(create(**fields).choices)
    chunks = list(create(**fields, stream=True))
    return whole, collect(choice for chunk in chunks for choice in chunk.choices)


async def in_a_loop(url: str, is_chat: bool, fields: dict[str, Any]) -> tuple[Answer, Answer]:
    """(whole, streamed)."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        create = create_of(client, is_chat)
        whole = collect((await create(**fields)).choices)
        chunks = [chunk async for chunk in await create(**fields, stream=True)]
        return whole, collect(choice for chunk in chunks for choice in chunk.choices)


@pytest.fixture
def seen(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """What reaches the engine, without what is a request's own."""
    seen: list[GenerateRequest] = []
    stream = server.booted.text_engine.stream

    def spy(request: GenerateRequest, offer: Offer | None = None) -> Any:
        tokens = tuple(request.prompt_tokens)
        one = replace(request, request_id="", arrived_ns=Ns(0), deadline_ns=None)
        seen.append(replace(one, prompt_tokens=tokens))
        return stream(request, offer)

    monkeypatch.setattr(server.booted.text_engine, "stream", spy)
    return seen


@pytest.mark.parametrize(("is_chat", "fields"), CASES)
def test_four_ways_to_ask_are_one(
    client: openai.OpenAI,
    server: RunningServer,
    seen: list[GenerateRequest],
    is_chat: bool,
    fields: dict[str, Any],
) -> None:
    begin: dict[str, Any] = {"messages": HELLO} if is_chat else {"prompt": PROMPT}
    common: dict[str, Any] = {"model": MODEL_NAME, "seed": 1, "max_tokens": 12, **begin}
    if "max_completion_tokens" in fields:
        del common["max_tokens"]
    answers = [
        *plain(client, is_chat, common | fields),
        *asyncio.run(in_a_loop(f"{server.url}/v1", is_chat, common | fields)),
    ]
    assert all(answer == answers[0] for answer in answers)
    assert all(reason in ("stop", "length") for _, reason in answers[0].values())
    requests = [seen[i : i + len(seen) // 4] for i in range(0, len(seen), len(seen) // 4)]
    assert requests == [requests[0]] * 4
    if not fields.keys() <= set(SHOWN_ONLY):
        plain(client, is_chat, common)
        assert seen[-1] != requests[0][0]
