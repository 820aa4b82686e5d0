"""What the router must know of a request: read from its body, which goes on as it is.

Decides what stands for a prompt's blocks; refuses to judge a field, which is the engine's matter.
A value of a kind that is not expected counts as absent.

An engine's tokens are not known here, so its blocks are not either. What stands for them are pieces
of the prompt's own text, each named by a hash over all that is before it. Messages are written one
after another, each in one spelling, so that a longer conversation has the names of a shorter one
and more behind.
"""

from array import array
from collections.abc import Iterable, Mapping
from hashlib import blake2b, sha256
from types import MappingProxyType
from typing import Any, Final

import msgspec

from headrace.core.base.errors import RequestError
from headrace.live.bounds import MAX_PRIORITY
from headrace.server.callers import session_of

TOKENS_PER_BLOCK: Final = 64
BYTES_PER_TOKEN: Final = 4  # of text, about
BLOCK_BYTES: Final = TOKENS_PER_BLOCK * BYTES_PER_TOKEN
MAX_BLOCKS: Final = 1024  # that are named: beyond, prompts are told apart no more
MAX_CHOICES: Final = 1024
UNSTATED_TOKENS: Final = 1 << 20  # as output of a request that states no limit

_VERSION: Final = "text1"
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

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
    """Fields of all routes, with whatever values they have."""

    model: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    instructions: Any = None
    tools: Any = None
    cache_salt: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    priority: Any = None
    prompt_cache_key: Any = None
    user: Any = None


_decode: Final = msgspec.json.Decoder(_Body).decode
_decode_raw: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read_ask(path: str, body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> Ask:
    """RequestError where the body is no JSON object."""
    fields = _fields(body)
    model = _text(fields.model)
    parts, num_prompts = _prompt(fields)
    root = [_VERSION, path, model, _text(fields.cache_salt), fields.tools]
    stated = (fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens)
    limits = [limit for value in stated if (limit := _number(value, -1)) >= 0]
    return Ask(
        model=model,
        block_names=_names(_encode(root), parts[0]),
        num_tokens=1 + sum(map(len, parts)) // BYTES_PER_TOKEN,
        num_choices=max(1, min(_number(fields.n, 1), MAX_CHOICES)) * num_prompts,
        max_tokens=min([*limits, UNSTATED_TOKENS]),
        priority=max(-MAX_PRIORITY, min(_number(fields.priority, 0), MAX_PRIORITY)),
        session=session_of(headers, _text(fields.prompt_cache_key), _text(fields.user)),
    )


def _fields(body: bytes) -> _Body:
    """A value that cannot be decoded counts as absent, like one of a wrong kind."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        raws = _decode_raw(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no JSON object: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    names = raws.keys() & set(_Body.__struct_fields__)
    return _Body(**{name: _value(raws[name]) for name in names})


def _prompt(fields: _Body) -> tuple[list[bytes], int]:
    """The bytes of the prompt, or of each of several; and how many sequences they begin."""
    given = fields.messages
    if given is None:
        given = fields.input if fields.prompt is None else fields.prompt
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
    so_far = blake2b(root, digest_size=16)
    end = min(len(data), MAX_BLOCKS * BLOCK_BYTES)
    for start in range(0, end - BLOCK_BYTES + 1, BLOCK_BYTES):
        so_far.update(data[start : start + BLOCK_BYTES])
        names.append(so_far.digest())
    return tuple(names)


def _value(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any, absent: int) -> int:
    return value if type(value) is int else absent
