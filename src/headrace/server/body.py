"""From the bytes of a request to a typed body: size, content type, strict JSON, errors that name
the field.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from starlette.types import Receive

from headrace.core.base.errors import RequestError
from headrace.core.config.units import size_text
from headrace.server.errors import JSON, ClientGone, unsupported
from headrace.server.wire import GenerationRequest

BODY_TIMEOUT_S = 60.0  # a body that takes longer to arrive is given up

_BOM = b"\xef\xbb\xbf"
# msgspec ends a message with "- at `$.messages[1].role`", or "- at `key` in `$.logit_bias`".
_PATH = re.compile(r" - at (?:`(?:key|\.\.\.)` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")
_FIELD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_IGNORED_NAMED = 16

Body = TypeVar("Body", bound=GenerationRequest)


async def read_body(
    headers: Mapping[str, str],
    receive: Receive,
    limit_bytes: int,
    timeout_s: float = BODY_TIMEOUT_S,
    *,
    is_here: bool = False,
) -> bytes:
    """The whole body, never more than the limit in memory. Raises RequestError 408, 413 or 415, or
    ClientGone. `is_here`: there is nothing to wait for.
    """
    _check_content_type(headers)
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    if is_here:
        return await _receive_all(receive, limit_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _receive_all(receive, limit_bytes)
    except TimeoutError:
        raise RequestError(
            "the body did not arrive in time",
            status_hint=408,
            code="request_timeout",
            limit_s=timeout_s,
        ) from None


async def _receive_all(receive: Receive, limit_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def decode_body(body: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """The typed body, and the names of fields that it does not know (at most 16, safe to show)."""
    if body.startswith(_BOM):
        raise _malformed("the body begins with a byte order mark; send plain UTF-8")
    try:
        request = msgspec.json.decode(body, type=kind)
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise _malformed("the body is nested too deeply") from None
    return request, _ignored_fields(kind, fields)


def _ignored_fields(kind: type[Body], fields: Mapping[str, msgspec.Raw]) -> list[str]:
    unknown = sorted(fields.keys() - set(kind.__struct_fields__))
    for name in unknown:
        if name in kind.refused and _value(fields[name]) not in kind.refused[name]:
            raise unsupported(name, f"`{name}`")
    return [name for name in unknown if _FIELD_NAME.fullmatch(name)][:_MAX_IGNORED_NAMED]


def _value(raw: msgspec.Raw) -> object:
    """Values of unknown fields have only been skipped so far: one that cannot be decoded is
    itself.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw


def _check_content_type(headers: Mapping[str, str]) -> None:
    content_type = headers.get("content-type", JSON)
    if content_type == JSON and "content-encoding" not in headers:
        return
    media_type, _, parameters = content_type.partition(";")
    media_type = media_type.strip().lower()
    is_json = media_type == JSON or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    charset = re.search(r"charset=\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if not is_json or (charset is not None and charset[1].lower() not in ("utf-8", "utf8")):
        raise RequestError(
            "the content type must be application/json in UTF-8",
            status_hint=415,
            code="unsupported_media_type",
            got=headers["content-type"][:100],
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(
            "a compressed body is not accepted",
            status_hint=415,
            code="unsupported_media_type",
            got=encoding[:100],
        )


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than {size_text(limit_bytes)}",
        status_hint=413,
        code="request_too_large",
    )


def _malformed(message: str) -> RequestError:
    return RequestError(message, code="invalid_json")


def _invalid(message: str) -> RequestError:
    path = _PATH.search(message)
    param = path["path"] if path else ""
    text = message[: path.start()] if path else message
    if missing := _MISSING.search(text):
        param = f"{param}.{missing['name']}" if param else missing["name"]
        text = f"the required field `{missing['name']}` is missing"
    else:
        text = text[:1].lower() + text[1:]
        text = f"`{param}`: {text}" if param else f"the body: {text}"
    return RequestError(text, code="invalid_type", param=param or None)
