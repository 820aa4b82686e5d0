"""Which events of a stream are tokens, and what makes an answer none."""

import json
from typing import Any

import pytest

from headrace.bench.client import Stream, StreamError
from headrace.core.base.types import Ns


def stream_of(*events: dict[str, Any]) -> Stream:
    stream = Stream()
    for number, event in enumerate(events):
        stream.take(json.dumps(event).encode(), Ns(number))
    return stream


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def text(piece: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": reason}]}


def test_a_chat_begins_with_its_role_and_ends_with_its_reason() -> None:
    stream = stream_of(
        delta(role="assistant", content=""), delta(content="Hi"), delta(content="!"), delta("stop")
    )
    assert stream.token_times_ns == [1, 2]
    assert stream.texts == ["Hi", "!"]
    assert stream.finish_reason == "stop"


def test_a_server_that_tells_the_role_each_time() -> None:
    stream = stream_of(*(delta(role="assistant", content=piece) for piece in ("", "a", "b")))
    assert stream.token_times_ns == [1, 2]


def test_thoughts_and_calls_are_tokens_and_no_text() -> None:
    stream = stream_of(
        delta(reasoning_content="hm"), delta(reasoning="hm"), delta(tool_calls=[{"index": 0}])
    )
    assert stream.token_times_ns == [0, 1, 2]
    assert stream.texts == []


def test_a_token_without_text_and_a_last_event_with_some() -> None:
    stream = stream_of(text(""), text("ä"), text("!", "length"), text("", "length"))
    assert stream.token_times_ns == [0, 1, 2]


def test_usage_comes_alone_or_with_every_event() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    stream = stream_of({**text("a"), "usage": usage}, {"choices": [], "usage": None})
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 1
    assert stream.usage.cached_tokens is None
    told = {**usage, "prompt_tokens_details": {"cached_tokens": 2}}
    again = stream_of({"choices": [], "usage": told})
    assert again.usage is not None
    assert again.usage.cached_tokens == 2


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"{", "not understood"),
        (b'{"choices": [{"text": 5}]}', "not understood"),
        (b'{"error": {"message": "lost"}}', "server failed"),
    ],
)
def test_what_is_no_event(data: bytes, kind: str) -> None:
    with pytest.raises(StreamError) as caught:
        Stream().take(data, Ns(0))
    assert caught.value.kind == kind
