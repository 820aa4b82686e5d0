"""Bytes to typed bodies."""

import asyncio
import time
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.types import Message

from headrace.core.base.errors import RequestError
from headrace.server.body import decode_body, read_body
from headrace.server.errors import ClientGone
from headrace.server.wire import ChatRequest, CompletionRequest


def read(pieces: list[bytes | None], limit: int = 10, **headers: str) -> bytes:
    """None stands for a client that leaves."""
    messages: list[Message] = [
        {"type": "http.disconnect"}
        if piece is None
        else {"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1}
        for i, piece in enumerate(pieces)
    ]

    async def receive() -> Message:
        return messages.pop(0)

    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(read_body(Headers(fields), receive, limit))


def refusal(function: Any, *args: Any, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        function(*args, **kwargs)
    return caught.value


def test_a_body_comes_in_pieces() -> None:
    assert read([b"ab", b"", b"cd"]) == b"abcd"


def test_a_body_may_be_as_large_as_the_limit() -> None:
    assert read([b"x" * 10]) == b"x" * 10
    assert refusal(read, [b"x" * 6, b"x" * 5]).status_hint == 413
    assert refusal(read, [], content_length="11").status_hint == 413


def test_nothing_is_read_after_the_limit() -> None:
    pieces: list[bytes | None] = [b"x" * 11, None]
    assert refusal(read, pieces).status_hint == 413


def test_a_client_that_leaves_while_it_sends() -> None:
    with pytest.raises(ClientGone):
        read([b"x", None])


def test_a_body_that_never_ends_is_given_up() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    error = refusal(asyncio.run, read_body(Headers(), receive, 10, timeout_s=0))
    assert error.status_hint == 408


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "Application/JSON; charset=UTF-8", "application/vnd.x+json"],
)
def test_kinds_of_json(content_type: str) -> None:
    assert read([b"{}"], content_type=content_type) == b"{}"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"messages": 5}', "messages", ("array", "int")),
        (b"{}", "messages", ("required", "messages")),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role", ("required", "role")),
        (b'{"messages": [{"role": 7}]}', "messages[0].role", ("str", "int")),
        (b'{"messages": [], "logit_bias": {"a": "b"}}', "logit_bias[...]", ("float", "str")),
        (b'{"messages": [], "stop": [1]}', "stop[0]", ("str", "int")),
        (b'{"messages": [], "stream_options": {"include_usage": 1}}', None, ("bool",)),
        (b"[]", None, ("object", "array")),
    ],
)
def test_a_wrong_type_is_named(body: bytes, param: str | None, words: tuple[str, ...]) -> None:
    error = refusal(decode_body, body, ChatRequest)
    assert error.code == "invalid_type"
    if param is not None:
        assert error.param == param
    for word in words:
        assert word in error.message


def test_bombs_are_refused_quickly() -> None:
    for body in (
        b'{"x":' * 100_000,
        b"[" * 1_000_000,
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"n":' + b"9" * 1_000_000 + b"}",
    ):
        begin = time.perf_counter()
        refusal(decode_body, body, ChatRequest)
        assert time.perf_counter() - begin < 0.5


def test_unknown_fields_are_named_where_that_is_safe() -> None:
    body = b'{"prompt": "x", "b": 1, "a": [], "\\u0000": 1, "' + b"y" * 65 + b'": 1}'
    _, ignored = decode_body(body, CompletionRequest)
    assert ignored == ["a", "b"]
    many = b'{"prompt": "x", ' + b", ".join(b'"f%03d": 1' % i for i in range(100)) + b"}"
    assert len(decode_body(many, CompletionRequest)[1]) == 16


def test_null_is_absent() -> None:
    request, ignored = decode_body(b'{"prompt": "x", "n": null, "stop": null}', CompletionRequest)
    assert request == CompletionRequest(prompt="x")
    assert ignored == []


@pytest.mark.parametrize("value", [b"null", b"false", b"[]", b"{}", b'""'])
def test_a_field_that_asks_for_nothing_is_no_refusal(value: bytes) -> None:
    body = b'{"prompt": "x", "guided_json": ' + value + b"}"
    assert decode_body(body, CompletionRequest)[1] == ["guided_json"]


def test_a_field_that_would_change_the_answer_is_refused() -> None:
    error = refusal(decode_body, b'{"prompt": "x", "guided_json": {"a": 1}}', CompletionRequest)
    assert (error.code, error.param) == ("unsupported_parameter", "guided_json")


@pytest.mark.parametrize("value", [b"1e400", b"9" * 5000, b'"\xff"'])
def test_a_refused_field_is_refused_whatever_it_holds(value: bytes) -> None:
    body = b'{"prompt": "x", "guided_json": ' + value + b"}"
    error = refusal(decode_body, body, CompletionRequest)
    assert (error.status_hint or 400, error.param) == (400, "guided_json")
