"""Requests of the official client with little to say."""

from typing import Any

import openai

from support.fake_engine import (
    MODEL_NAME,
)

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PROMPT = "Once upon a time"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(model=MODEL_NAME, prompt=prompt, **fields)


def chat(client: openai.OpenAI, messages: Any = HELLO, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL_NAME, messages=messages, **fields)
