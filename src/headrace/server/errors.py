"""What a client is told when something went wrong: OpenAI's error object, and nothing of our
insides.
"""

import math
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headrace.core.base.errors import DeviceError, HeadraceError, OverloadError, RequestError
from headrace.core.base.request import FinishReason

JSON = "application/json"


class ErrorObject(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    error: ErrorObject


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as HTTP says it. `retry_after_s` None = coming back will not help."""

    status: int
    error: ErrorObject
    retry_after_s: float | None = None
    allow: str | None = None  # methods that the route knows, on 405

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorEnvelope(self.error))

    def response(self) -> Response:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.allow is not None:
            headers["allow"] = self.allow
        return Response(self.body(), self.status, headers, media_type=JSON)


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def failure_of(error: BaseException) -> Failure:
    """Total: whatever is raised has an answer. Only errors of the tree show their message."""
    match error:
        case RequestError():
            fields = ErrorObject(_text(error), _type_of(error.status_hint), error.param, error.code)
            return Failure(error.status_hint, fields)
        case OverloadError():
            code = "rate_limit_exceeded" if error.status_hint == 429 else "overloaded"
            fields = ErrorObject(_text(error), _type_of(error.status_hint), None, code)
            return Failure(error.status_hint, fields, error.retry_after_s)
        case HTTPException():
            return _of_http(error)
        case _:
            message = "the server failed on this request; its log says why"
            return Failure(500, ErrorObject(message, _type_of(500), None, "internal_error"))


def failure_of_finish(reason: FinishReason, error: str) -> HeadraceError | None:
    """The error that an end of a sequence means; None for an end as it should be."""
    match reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.DEADLINE:
            return RequestError(
                "the request did not finish within its time limit",
                status_hint=504,
                code="deadline_exceeded",
                hint="ask for fewer tokens, or raise `server.request_timeout_s`",
            )
        case FinishReason.CANCELLED:
            return OverloadError("the request was cancelled by the server", retry_after_s=1.0)
        case FinishReason.ERROR:
            # Why is for the log, not for the client.
            failed = RequestError(
                "the engine failed on this request", status_hint=500, code="engine_error"
            )
            failed.__cause__ = DeviceError(error)
            return failed


def unsupported(param: str, what: str) -> RequestError:
    return RequestError(f"{what} is not supported yet", code="unsupported_parameter", param=param)


def _of_http(error: HTTPException) -> Failure:
    status = error.status_code
    allow = (error.headers or {}).get("Allow")
    match status:
        case 404:
            message, code = "no such route", "not_found"
        case 405:
            message, code = f"this route only knows {allow}", "method_not_allowed"
        case _:
            message, code = HTTPStatus(status).phrase.lower(), "http_error"
    return Failure(status, ErrorObject(message, _type_of(status), None, code), allow=allow)


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 504:
        return "timeout_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _text(error: HeadraceError) -> str:
    facts = ", ".join(f"{name}={value}" for name, value in error.data.items())
    text = f"{error.message} ({facts})" if facts else error.message
    return f"{text}; {error.hint}" if error.hint else text
