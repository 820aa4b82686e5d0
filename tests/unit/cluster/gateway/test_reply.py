"""Streams cut where events end, however they arrive."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.gateway.headers import to_client, to_engine
from headrace.cluster.gateway.reply import Events

EVENTS = b'data: {"a": 1}\n\n', b": keep-alive\n\n", b'data: {"b": 2}\r\n\r\n', b"data: [DONE]\n\n"
STREAM = b"".join(EVENTS)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_all_bytes_pass_and_only_whole_events_at_once(cuts: list[int]) -> None:
    events, sent = Events(), b""
    places = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(places):
        sent += events.take(STREAM[start:end])
        assert sent in [b"".join(EVENTS[:count]) for count in range(5)]
    assert (sent, events.flush()) == (STREAM, b"")
    assert events.is_whole


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_events_are_counted(end: bytes) -> None:
    events = Events()
    for chunk in (b"data: 1" + end, b"data: 2" + end + b"data: 3", end):
        events.take(chunk)
    assert events.num == 3


@pytest.mark.parametrize(
    ("stream", "is_whole"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"data: [DONE]\n", True),
        (b'data: {"a": 1}\n\ndata: {"error": {}}\n\n', True),
        (b'event: error\ndata: {"message": "x"}\n\n', True),
        (b'data: {"a": "[DONE]"}\n\n', False),
        (b'data: {"a": 1}\n\n', False),
        (b"data: [DON", False),
        (b"", False),
    ],
)
def test_which_streams_are_whole(stream: bytes, is_whole: bool) -> None:
    events = Events()
    events.take(stream)
    assert events.is_whole is is_whole
    events.flush()


def test_an_event_of_any_length_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cluster.gateway.reply.MAX_EVENT_BYTES", 100)
    events = Events()
    assert events.take(b"x" * 100) == b""
    assert events.take(b"y") == b"x" * 100 + b"y"


def test_headers_of_one_connection_stay_on_it() -> None:
    headers = [
        (b"host", b"gateway"),
        (b"connection", b"close, X-Own"),
        (b"x-own", b"1"),
        (b"te", b"trailers"),
        (b"authorization", b"Bearer mine"),
        (b"x-text", "ä".encode()),
        (b"x-bytes", b"\xff"),
    ]
    assert to_engine(headers, "id", "") == [
        (b"authorization", b"Bearer mine"),
        (b"x-text", "ä".encode()),
        (b"x-bytes", b"\xff"),
        (b"accept-encoding", b"identity"),
        (b"x-request-id", b"id"),
    ]
    assert (b"authorization", b"Bearer key") in to_engine(headers, "id", "key")
    assert (b"authorization", b"Bearer mine") not in to_engine(headers, "id", "key")
    own = [(b"X-Headrace-Worker", b"other"), (b"X-Headrace-Prefill-Worker", b"another")]
    answer = [(b"Transfer-Encoding", b"chunked"), *own, (b"A", b"1")]
    assert to_client(answer, "e0", "7") == [
        (b"a", b"1"),
        (b"x-headrace-worker", b"e0"),
        (b"x-headrace-decision", b"7"),
    ]
