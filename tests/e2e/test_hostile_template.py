"""A template made to do harm, behind a server: an error for who asked, nothing for the others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from headrace.models.text.template_wire import Limits
from support.fake_engine import MODEL_NAME, TEMPLATE, formula_model
from support.http_server import running_server

HOSTILE = (
    "{% if messages[0].content == 'time' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
    "{% if messages[0].content == 'memory' %}{{ 'x' * 10**9 }}{% endif %}" + TEMPLATE
)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    limits = Limits(render_s=1.0)
    with (
        formula_model(template_source=HOSTILE, limits=limits) as booted,
        running_server(booted) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def chat(client: openai.OpenAI, text: str) -> str | None:
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": text}], max_tokens=3
    )
    return answer.choices[0].message.content


@pytest.mark.parametrize(
    ("harm", "said"), [("time", "longer than 1 s"), ("memory", "512 MiB of memory")]
)
def test_harm_is_an_error_of_the_server(client: openai.OpenAI, harm: str, said: str) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        chat(client, harm)
    error = raised.value
    assert (error.status_code, error.code, error.type) == (500, "chat_template", "server_error")
    assert error.param == "messages"
    assert said in error.message
    assert "--chat-template FILE" in error.message
    assert chat(client, "hi")


def test_a_stream_fails_before_it_begins(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="longer than 1 s"):
        client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "time"}], stream=True
        )


def test_others_go_on_while_a_template_does_harm(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(1) as pool:
        harmed = pool.submit(chat, client, "time")
        num_answers = 0
        while not harmed.done():
            client.completions.create(model=MODEL_NAME, prompt="abc", max_tokens=3)
            client.models.list()
            num_answers += 1
        assert isinstance(harmed.exception(), openai.InternalServerError)
    assert num_answers >= 3
    assert chat(client, "hi")
