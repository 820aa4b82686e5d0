"""Any bytes may come in at the generating routes: the answer is a result or an OpenAI error, never
a 500.
"""

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.fake_engine import MODEL_NAME, formula_model
from support.http_server import RunningServer, running_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

SETTINGS = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)

PROBABLE: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 258),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 10),
    "logit_bias": st.dictionaries(st.integers(0, 257).map(str), st.floats(-100, 100), max_size=3),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 257), max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "max_tokens": st.integers(1, 8),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "n": st.integers(1, 3),
    "prompt_logprobs": st.integers(0, 5),
    "stream": st.just(False),
    "user": st.text(max_size=10),
    "priority": st.integers(-5, 5),
    "cache_salt": st.text(max_size=5),
    "return_token_ids": st.booleans(),
    "response_format": st.just({"type": "text"}),
}
texts = st.text(min_size=1, max_size=30)
prompts = (
    texts
    | st.lists(texts, min_size=1, max_size=3)
    | st.lists(st.integers(0, 257), min_size=1, max_size=9)
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts}
    ),
    min_size=1,
    max_size=3,
)


def some_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with formula_model() as booted, running_server(booted, max_body_bytes=1 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[HTTPConnection]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    yield connection
    connection.close()


def post(http: HTTPConnection, path: str, body: bytes) -> tuple[int, Any]:
    http.request("POST", path, body, {"content-type": "application/json"})
    response = http.getresponse()
    return response.status, json.loads(response.read())


def is_error(answer: Any) -> bool:
    return set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}


@SETTINGS
@given(path=st.sampled_from([CHAT, COMPLETIONS]), body=st.binary(max_size=200))
def test_any_bytes(http: HTTPConnection, path: str, body: bytes) -> None:
    status, answer = post(http, path, body)
    assert status in (200, 400)
    assert status == 200 or is_error(answer)


@SETTINGS
@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    fields=st.dictionaries(
        st.sampled_from([*PROBABLE, "prompt", "messages", "tools", "suffix", "echo", "logprobs"]),
        values,
        max_size=5,
    ),
    own=st.booleans(),
)
def test_any_json(http: HTTPConnection, path: str, fields: dict[str, Any], own: bool) -> None:
    if own:
        fields = {
            "prompt": "x",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 2,
        } | fields
    # Streams are another shape of answer; they are tested for their own.
    fields.pop("stream", None)
    fields.setdefault("max_tokens", 2)
    begin = time.perf_counter()
    status, answer = post(http, path, json.dumps(fields).encode())
    assert status in (200, 400), answer
    assert status == 200 or is_error(answer)
    assert time.perf_counter() - begin < 10


@SETTINGS
@given(
    fields=some_of({**PROBABLE, "logprobs": st.integers(0, 5), "echo": st.booleans()}),
    prompt=prompts,
)
def test_a_valid_completion_succeeds(
    http: HTTPConnection, fields: dict[str, Any], prompt: Any
) -> None:
    status, answer = post(http, COMPLETIONS, json.dumps({"prompt": prompt} | fields).encode())
    assert status == 200, answer
    num_prompts = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
    assert [c["index"] for c in answer["choices"]] == list(range(num_prompts * fields.get("n", 1)))


@SETTINGS
@given(
    fields=some_of({**PROBABLE, "logprobs": st.booleans(), "add_generation_prompt": st.booleans()}),
    messages=messages,
)
def test_a_valid_chat_succeeds(
    http: HTTPConnection, fields: dict[str, Any], messages: list[Any]
) -> None:
    fields = {"messages": messages, "max_tokens": 4, "model": MODEL_NAME, **fields}
    status, answer = post(http, CHAT, json.dumps(fields).encode())
    assert status == 200, answer
    assert len(answer["choices"]) == fields.get("n", 1)
    assert answer["usage"]["completion_tokens"] <= fields["max_tokens"] * fields.get("n", 1)


@SETTINGS
@given(
    fields=some_of({**PROBABLE, "logprobs": st.integers(0, 3), "echo": st.booleans()}),
    prompt=prompts,
)
def test_a_stream_says_the_same_as_a_whole_answer(
    http: HTTPConnection, fields: dict[str, Any], prompt: Any
) -> None:
    fields.pop("prompt_logprobs", None)
    fields = {"prompt": prompt, "seed": 7, **fields, "stream": False}
    _, whole = post(http, COMPLETIONS, json.dumps(fields).encode())
    http.request("POST", COMPLETIONS, json.dumps(fields | {"stream": True}).encode())
    events = http.getresponse().read().decode().split("\n\n")[:-1]
    assert events[-1] == "data: [DONE]"
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    finishes: dict[int, list[str]] = {}
    for event in events[:-1]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["text"]
        logprobs.setdefault(index, []).extend((choice["logprobs"] or {"tokens": []})["tokens"])
        finishes.setdefault(index, []).extend(
            [choice["finish_reason"]] * bool(choice["finish_reason"])
        )
    for choice in whole["choices"]:
        index = choice["index"]
        assert texts[index] == choice["text"]
        assert finishes[index] == [choice["finish_reason"]]
        assert logprobs[index] == (choice["logprobs"] or {"tokens": []})["tokens"]


def test_nothing_is_left(server: RunningServer) -> None:
    stats = server.booted.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pinned_blocks) == (0, 0, 0)
    server.booted.engine.check()
