"""Real weights behind real HTTP: the default model, and a tiny random one that no byte escapes."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace import LLM
from headrace.core.config.schema import Config, DeviceConfig, KvConfig, ModelConfig
from headrace.live.boot import boot
from support.http_server import RunningServer, running_server
from support.tiny_model import write_tiny_model

README = Path(__file__).parents[2] / "README.md"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def served(config: Config) -> Iterator[RunningServer]:
    booted = boot(config)
    try:
        with running_server(booted) as server:
            yield server
    finally:
        booted.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    config = Config(
        model=ModelConfig(path=str(path), name="tiny"), kv=KvConfig(memory_bytes=4 << 20)
    )
    yield from served(config)


@pytest.fixture(scope="module")
def default() -> Iterator[RunningServer]:
    # Exact activations: to a model this small, Paris is one likely beginning among several.
    yield from served(
        Config(
            model=ModelConfig(max_model_len=1024),
            device=DeviceConfig(activations="f32"),
            kv=KvConfig(memory_bytes=64 << 20),
        )
    )


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def streamed(client: openai.OpenAI, **fields: Any) -> str:
    chunks: Any = client.completions.create(model="tiny", stream=True, **fields)
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_says_what_a_whole_answer_says(tiny: RunningServer, seed: int) -> None:
    fields: dict[str, Any] = {"prompt": f"prompt {seed}", "max_tokens": 60, "seed": seed}
    if seed % 2:
        fields |= {"stop": ["e", "\ufffd"], "temperature": 2.0}
    with client_of(tiny) as client:
        whole: Any = client.completions.create(model="tiny", **fields)
        assert streamed(client, **fields) == whole.choices[0].text


def test_company_does_not_change_an_answer(tiny: RunningServer) -> None:
    with client_of(tiny) as client, ThreadPoolExecutor(16) as pool:

        def ask(seed: int) -> str:
            return streamed(client, prompt="the same " * seed, max_tokens=40, seed=seed)

        together = list(pool.map(ask, range(1, 17)))
        alone = [ask(seed) for seed in range(1, 17)]
    assert together == alone


def test_a_scored_prompt_adds_up(tiny: RunningServer) -> None:
    """The log probability of a token is the same whether it is made or given."""
    with client_of(tiny) as client:
        made: Any = client.completions.create(
            model="tiny", prompt="abc", max_tokens=8, temperature=0, logprobs=1,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        prompt = made.choices[0].prompt_token_ids + made.choices[0].token_ids
        given: Any = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=1
        )
    assert given.choices[0].logprobs.token_logprobs[-8:] == made.choices[0].logprobs.token_logprobs
    assert given.choices[0].logprobs.tokens[-8:] == made.choices[0].logprobs.tokens


def test_the_default_model_answers(default: RunningServer) -> None:
    with client_of(default) as client:
        (model,) = client.models.list()
        fields: Any = {"model": model.id, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
        whole = client.chat.completions.create(**fields)
        chunks: Any = client.chat.completions.create(**fields, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        again = client.chat.completions.create(**fields)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert text == whole.choices[0].message.content == again.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("activations", ["auto", "f32"])
def test_the_answer_in_the_readme_is_the_answer(activations: str) -> None:
    """What a newcomer tries first comes as it is printed, however inputs are rounded."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    asked = re.search(r"-d '(\{\"messages\".*temperature.*\})'", readme)
    answered = re.search(r'\{"content":"([^"]*)","role":"assistant"', readme)
    usage = re.search(r'"usage":(\{"prompt_tokens":\d+,"completion_tokens":\d+)', readme)
    assert asked
    assert answered
    assert usage
    messages = json.loads(asked[1])["messages"]
    with LLM(activations=activations, max_model_len=1024, kv_memory="64MiB") as llm:
        (found,) = llm.chat(messages, temperature=0, max_tokens=40)
    assert found.outputs[0].text == answered[1]
    assert list(json.loads(usage[1] + "}").values()) == [
        len(found.prompt_token_ids),
        len(found.outputs[0].token_ids),
    ]


def test_the_default_model_never_breaks_a_character(default: RunningServer) -> None:
    """What the pieces say is what all bytes say together."""
    with client_of(default) as client:
        chunks: Any = client.completions.create(
            model="", prompt="Emoji: 😀 🎉 🚀 日本語 😀 🎉 🚀 日本語 😀", max_tokens=40,
            temperature=0, stream=True, extra_body={"return_token_ids": True},
        )  # fmt: skip
        choices = [chunk.choices[0] for chunk in chunks]
    token_ids = [one for choice in choices for one in getattr(choice, "token_ids", None) or []]
    text = "".join(choice.text for choice in choices)
    assert len(token_ids) == 40
    assert text == default.booted.loaded.tokenizer.decode(token_ids)
    assert any(ord(char) > 0x3000 for char in text)


@pytest.mark.parametrize("activations", ["auto", "f32"])
def test_the_example_of_the_readme_is_what_the_model_says(activations: str) -> None:
    """However inputs are rounded, so that whoever tries it sees the same."""
    text = README.read_text()
    [asked] = re.findall(r"-d '(\{.*capital.*\})'", text)
    [told] = re.findall(r'"content":"(.*?)","role":"assistant"', text)
    body = json.loads(asked)
    with LLM(activations=activations, max_model_len=1024, kv_memory="64MiB") as llm:
        [answer] = llm.chat(
            body["messages"], temperature=body["temperature"], max_tokens=body["max_tokens"]
        )
    assert answer.outputs[0].text == told
