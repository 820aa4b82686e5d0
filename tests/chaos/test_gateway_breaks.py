"""Answers of engines that break off: what the client and the operator hear."""

import json
import logging

import httpx
import pytest

from chaos.test_gateway import GOOD_BYTES, ask, bad_and_good, gateway_over, last_event
from support import stub_engine as stub

CUTS: dict[str, tuple[bytes, ...]] = {
    "between events": (stub.chunk(stub.event("one")),),
    "within an event": (stub.chunk(stub.event("one")), stub.chunk(stub.event("two")[:20])),
    "within a chunk": (stub.chunk(stub.event("one")), b"40\r\ndata: {"),
    "as if it were whole": (stub.chunk(stub.event("one")), stub.LAST_CHUNK),
    "with garbage": (stub.chunk(stub.event("one")), b"zz\r\n"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_stream_that_breaks_off_says_so(cut: str) -> None:
    with bad_and_good(stub.sends(stub.STREAM_HEAD, *CUTS[cut])) as (gateway, _, good):
        response = ask(gateway)
        assert response.headers["x-headrace-worker"] == "e0"
        assert response.content.startswith(stub.event("one"))
        assert last_event(response.content)["error"] == {
            "message": "the engine failed in the middle of the answer; ask again",
            "type": "server_error",
            "param": None,
            "code": "engine_failed",
        }
        assert not good.asked


def test_also_one_whose_length_was_said(caplog: pytest.LogCaptureFixture) -> None:
    head = stub.STREAM_HEAD.replace(b"transfer-encoding: chunked", b"content-length: 1000")
    with bad_and_good(stub.sends(head, stub.event("one"))) as (gateway, _, _):
        response = ask(gateway)
        assert response.content.startswith(stub.event("one"))
        assert last_event(response.content)["error"]["code"] == "engine_failed"
    (line,) = errors_of(caplog)
    assert json.loads(line)["faults"] == ["engine e0: the answer broke off"]


JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SHORT = stub.sends(JSON_HEAD + b"content-length: 100\r\n\r\n", b'{"id"')


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What an operator reads by default."""
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_where_less_comes_than_was_said_another_engine_is_asked() -> None:
    with bad_and_good(SHORT) as (gateway, bad, good):
        assert ask(gateway, stream=False).content == GOOD_BYTES
        assert (len(bad.asked), len(good.asked)) == (1, 1)


def test_where_there_is_no_other_one_the_client_and_the_log_hear_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with gateway_over(SHORT) as (gateway, _):
        response = ask(gateway, stream=False)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert response.json()["error"]["message"] == "no engine has given a whole answer"
    (line,) = errors_of(caplog)
    assert json.loads(line)["faults"] == [
        "engine e0: the answer broke off: 5 of 100 bytes of its body have come"
    ]


@pytest.mark.parametrize("begin", [b"transfer-encoding: chunked", b"content-length: 2000000"])
def test_an_answer_that_breaks_off_later_breaks_the_connection(
    begin: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else tells it from one that is whole."""
    body = b"6\r\n" + b'{"id":\r\n' if b"chunked" in begin else b'{"id":'
    broken = stub.sends(JSON_HEAD + begin + b"\r\n\r\n", body)
    with bad_and_good(broken) as (gateway, _, _), pytest.raises(httpx.RemoteProtocolError):
        ask(gateway, stream=False)
    (line,) = errors_of(caplog)
    assert json.loads(line)["faults"] == ["engine e0: the answer broke off"]
    assert "failed in the middle" in json.loads(line)["error"]


def test_an_engines_own_error_ends_a_stream() -> None:
    error = b'data: {"error": {"message": "out of memory"}}\n\n'
    pieces = stub.chunk(stub.event("one")) + stub.chunk(error) + stub.LAST_CHUNK
    with gateway_over(stub.sends(stub.STREAM_HEAD, pieces)) as (gateway, _):
        assert ask(gateway).content == stub.event("one") + error
