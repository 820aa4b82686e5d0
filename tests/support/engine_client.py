"""What the official client gets of an OpenAI-compatible server, other people's included."""

from typing import Any

import httpx
import openai
import pytest


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def chat_text(url: str, model: str, question: str, *, stream: bool) -> str:
    messages: Any = [{"role": "user", "content": question}]
    asked: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 24}
    with client_of(url) as client:
        if not stream:
            whole = client.chat.completions.create(**asked, temperature=0)
            return whole.choices[0].message.content or ""
        chunks = client.chat.completions.create(**asked, temperature=0, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def shows_its_model(url: str, model: str) -> None:
    with client_of(url) as client:
        assert [one.id for one in client.models.list()] == [model]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def figure_of(url: str, name: str) -> float:
    """Of /metrics, the first line that begins with `name`."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name)))
