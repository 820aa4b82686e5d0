"""The official client's async half, on completions."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import openai
import pytest

from support.client_calls import PROMPT
from support.fake_engine import MODEL_NAME
from support.http_server import RunningServer
from support.raw_http import eventually, is_idle

Result = TypeVar("Result")


def with_client(
    server: RunningServer, use: Callable[[openai.AsyncOpenAI], Awaitable[Result]]
) -> Result:
    async def run() -> Result:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await use(client)

    return asyncio.run(run())


def complete(client: openai.AsyncOpenAI, prompt: Any = PROMPT, **fields: Any) -> Awaitable[Any]:
    create: Any = client.completions.create
    answer: Awaitable[Any] = create(model=MODEL_NAME, prompt=prompt, **fields)
    return answer


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> str:
    chunks = await complete(client, stream=True, **fields)
    return "".join([chunk.choices[0].text async for chunk in chunks])


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> str:
    answer = await complete(client, **fields)
    text: str = answer.choices[0].text
    return text


def test_many_at_once_get_what_they_would_get_alone(server: RunningServer) -> None:
    async def use(client: openai.AsyncOpenAI) -> tuple[list[str], list[str]]:
        requests = [{"seed": seed, "max_tokens": 12, "echo": seed % 2 == 0} for seed in range(24)]
        together = await asyncio.gather(*(streamed(client, **one) for one in requests))
        return together, [await whole(client, **one) for one in requests]

    together, alone = with_client(server, use)
    assert together == alone
    assert len(set(alone)) == len(alone)


def test_several_prompts_and_choices_keep_their_numbers(server: RunningServer) -> None:
    async def use(client: openai.AsyncOpenAI) -> tuple[Any, dict[int, str]]:
        fields: dict[str, Any] = {"prompt": ["a", "bc"], "n": 2, "seed": 5, "max_tokens": 4}
        answer = await complete(client, logprobs=1, **fields)
        texts = dict.fromkeys(range(4), "")
        async for chunk in await complete(client, stream=True, **fields):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return answer, texts

    answer, texts = with_client(server, use)
    assert {choice.index: choice.text for choice in answer.choices} == texts
    assert all(len(choice.logprobs.tokens) == 4 for choice in answer.choices)
    assert answer.usage.completion_tokens == 16


def test_a_refusal_is_an_exception(server: RunningServer) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            with_client(server, partial(complete, temperature=-1, stream=stream))
        assert caught.value.param == "temperature"


def test_whoever_stops_reading_ends_the_work(server: RunningServer) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        async with await complete(client, stream=True, max_tokens=1500) as chunks:
            async for chunk in chunks:
                assert chunk.choices[0].text
                return

    with_client(server, use)
    eventually(lambda: is_idle(server))
