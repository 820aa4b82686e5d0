"""Errors as clients read them."""

from starlette.exceptions import HTTPException

from headrace.core.base.errors import DeviceError, InvariantError, OverloadError, RequestError
from headrace.core.base.request import FinishReason
from headrace.server.errors import failure_of, failure_of_finish


def test_an_error_of_ours_shows_nothing() -> None:
    for error in (ValueError("/secret/path"), InvariantError("x", y=1), DeviceError("gpu 3")):
        failure = failure_of(error)
        assert failure.status == 500
        for word in ("secret", "gpu", "y=1"):
            assert word not in failure.error.message


def test_an_overload_says_when_to_come_back() -> None:
    for seconds, header in ((0.01, "1"), (2.0, "2"), (2.1, "3")):
        failure = failure_of(OverloadError("full", retry_after_s=seconds, status_hint=429))
        assert failure.response().headers["retry-after"] == header
        assert failure.error.code == "rate_limit_exceeded"


def test_facts_and_hint_are_part_of_the_message() -> None:
    error = RequestError("too long", param="stop", hint="shorten it", limit=5)
    assert failure_of(error).error.message == "too long (limit=5); shorten it"


def test_a_wrong_method_says_which_are_right() -> None:
    failure = failure_of(HTTPException(405, headers={"Allow": "POST"}))
    assert failure.response().headers["allow"] == "POST"


def test_every_end_has_a_meaning() -> None:
    errors = {reason: failure_of_finish(reason, "") for reason in FinishReason}
    statuses = {reason: error and failure_of(error).status for reason, error in errors.items()}
    assert statuses == {
        FinishReason.STOP: None,
        FinishReason.LENGTH: None,
        FinishReason.CANCELLED: 503,
        FinishReason.DEADLINE: 504,
        FinishReason.ERROR: 500,
    }
