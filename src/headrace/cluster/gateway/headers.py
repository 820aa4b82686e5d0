"""Which headers cross the gateway, in both directions.

What concerns one connection stays on it, and what names the gateway's own host, too. The rest goes
on as it is.
"""

from collections.abc import Iterable, Sequence
from typing import Final

Raw = Sequence[tuple[bytes, bytes]]

# RFC 9110, 7.6.1, with its forerunners.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The answer is looked into, as far as where its events end: it must not be compressed.
_NOT_TO_ENGINE: Final = _HOP_BY_HOP | {
    b"accept-encoding",
    b"content-length",
    b"expect",
    b"host",
    b"x-request-id",
}
_KEY: Final = b"authorization"
_NOT_TO_CLIENT: Final = _HOP_BY_HOP | {
    b"date",
    b"server",
    b"x-headrace-decision",
    b"x-headrace-prefill-worker",
    b"x-headrace-worker",
    b"x-request-id",
}


def to_engine(headers: Raw, request_id: str, key: str) -> Raw:
    """With the engine's own key, where it has one, in place of the client's credentials."""
    kept = [pair for pair in _kept(headers, _NOT_TO_ENGINE) if not (key and pair[0] == _KEY)]
    if key:
        kept.append((_KEY, b"Bearer " + key.encode()))
    return [*kept, (b"accept-encoding", b"identity"), (b"x-request-id", request_id.encode())]


def to_client(headers: Raw, engine_name: str, decision_id: str) -> list[tuple[bytes, bytes]]:
    return [
        *_kept(((name.lower(), value) for name, value in headers), _NOT_TO_CLIENT),
        (b"x-headrace-worker", engine_name.encode()),
        (b"x-headrace-decision", decision_id.encode()),
    ]


def _kept(headers: Iterable[tuple[bytes, bytes]], left_out: frozenset[bytes]) -> Raw:
    """`headers` have names in lower case. A Connection header names others of its kind."""
    headers = list(headers)
    for name, value in headers:
        if name == b"connection":
            left_out = left_out | {word.strip().lower() for word in value.split(b",")}
    return [pair for pair in headers if pair[0] not in left_out]
