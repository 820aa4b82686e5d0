"""What the router must know of a request: read from its body, which goes on as it is.

Decides what stands for a prompt's blocks; refuses to judge a field, which is the engine's matter.
A value of a kind that is not expected counts as absent.

An engine's tokens are not known here, so its blocks are not either. What stands for them are pieces
of the prompt's own text, each named by a hash over all that is before it. Messages are written one
after another, each in one spelling, so that a longer conversation has the names of a shorter one
and more behind.
"""

from array import array
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Final, TypeVar

import msgspec

from headrace.core.base.errors import RequestError
from headrace.live.bounds import MAX_PRIORITY

TOKENS_PER_BLOCK: Final = 64
BYTES_PER_TOKEN: Final = 4  # of text, about
BLOCK_BYTES: Final = TOKENS_PER_BLOCK * BYTES_PER_TOKEN
MAX_BLOCKS: Final = 1024  # that are named: beyond, prompts are told apart no more
MAX_CHOICES: Final = 1024
MAX_SESSION_CHARS: Final = 256
UNSTATED_TOKENS: Final = 1 << 20  # as output of a request that states no limit

_ABSENT: Final = msgspec.Raw(b"null")
_VERSION: Final = "text1"
_Value = TypeVar("_Value")

_encode = msgspec.json.Encoder(order="sorted").encode


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # "" = any
    block_names: tuple[bytes, ...]
    # As engines that publish KV events name their blocks; else the names stand for text.
    is_named_by_tokens: bool = False
    num_tokens: int  # of the prompt, estimated from its bytes where its tokens are not known
    num_choices: int
    max_tokens: int  # of each choice
    priority: int
    session: str


class _Body(msgspec.Struct):
    """Fields of all routes; their values stay as they are until somebody asks."""

    model: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT
    n: msgspec.Raw = _ABSENT
    max_tokens: msgspec.Raw = _ABSENT
    max_completion_tokens: msgspec.Raw = _ABSENT
    max_output_tokens: msgspec.Raw = _ABSENT
    priority: msgspec.Raw = _ABSENT
    prompt_cache_key: msgspec.Raw = _ABSENT
    user: msgspec.Raw = _ABSENT


def read_ask(path: str, body: bytes, session: str = "") -> Ask:
    """`session` is what a header names; without it, the body may. RequestError where the body is no
    JSON object.
    """
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no JSON object: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    model = _text(fields.model)
    parts, num_prompts = _prompt(fields)
    root = [_VERSION, path, model, _text(fields.cache_salt), _any(fields.tools)]
    limits = (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens)
    stated = [limit for raw in limits if (limit := _value(raw, int, -1)) >= 0]
    return Ask(
        model=model,
        block_names=_names(_encode(root), parts[0]),
        num_tokens=1 + sum(map(len, parts)) // BYTES_PER_TOKEN,
        num_choices=max(1, min(_value(fields.n, int, 1), MAX_CHOICES)) * num_prompts,
        max_tokens=min([*stated, UNSTATED_TOKENS]),
        priority=max(-MAX_PRIORITY, min(_value(fields.priority, int, 0), MAX_PRIORITY)),
        session=(session or _text(fields.prompt_cache_key) or _text(fields.user))[
            :MAX_SESSION_CHARS
        ],
    )


def _prompt(fields: _Body) -> tuple[list[bytes], int]:
    """The bytes of the prompt, or of each of several; and how many sequences they begin."""
    given = _first(fields.messages, fields.prompt, fields.input)
    head = _text(fields.instructions).encode()
    match given:
        case str():
            return [head + given.encode()], 1
        case list() if given and all(type(item) is int for item in given):
            return [_token_bytes(given)], 1
        case list() if given and all(isinstance(item, str | list) for item in given):
            parts = [
                item.encode() if isinstance(item, str) else _token_bytes(item) for item in given
            ]
            return parts, min(len(parts), MAX_CHOICES)
        case list():
            return [head + b"".join(_message_bytes(item) for item in given)], 1
        case _:
            return [head], 1


def _first(*raws: msgspec.Raw) -> Any:
    return next((value for raw in raws if (value := _any(raw)) is not None), None)


def _message_bytes(message: Any) -> bytes:
    """One spelling, whatever the client's: the role as in a template, then the rest by name, no
    nulls. What is not text, pictures above all, is long and no prompt of as many tokens; its digest
    stands for it.
    """
    if not isinstance(message, dict):
        return _encode(message) + b"\n"
    message = {key: value for key, value in message.items() if value is not None}
    if isinstance(content := message.get("content"), list):
        message["content"] = [
            part if _is_text(part) else sha256(_encode(part)).hexdigest() for part in content
        ]
    return _encode(message.pop("role", None)) + _encode(message) + b"\n"


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _token_bytes(tokens: Iterable[Any]) -> bytes:
    return array("I", (t & 0xFFFFFFFF for t in tokens if type(t) is int)).tobytes()


def _names(root: bytes, data: bytes) -> tuple[bytes, ...]:
    """Of the full blocks of a prompt."""
    names = []
    name = sha256(root).digest()[:16]
    end = min(len(data), MAX_BLOCKS * BLOCK_BYTES)
    for start in range(0, end - BLOCK_BYTES + 1, BLOCK_BYTES):
        name = sha256(name + data[start : start + BLOCK_BYTES]).digest()[:16]
        names.append(name)
    return tuple(names)


def _value(raw: msgspec.Raw, kind: type[_Value], absent: _Value) -> _Value:
    if raw is _ABSENT:
        return absent
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return absent


def _text(raw: msgspec.Raw) -> str:
    return _value(raw, str, "")


def _any(raw: msgspec.Raw) -> Any:
    return _value(raw, object, None)
