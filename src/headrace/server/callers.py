"""Who sends a request: the session that it is a part of, and the tenant whose turn it takes.

Decides what stands for them; keeps no key, and checks none.
"""

import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

SESSION_HEADER: Final = "x-session-id"
MAX_SESSION_CHARS: Final = 256


def session_of(headers: Mapping[str, str], cache_key: str | None, user: str | None) -> str:
    """What the header names, or else the body's `prompt_cache_key` or `user`; empty = none."""
    return (headers.get(SESSION_HEADER) or cache_key or user or "")[:MAX_SESSION_CHARS]


class Tenants:
    """Names that mean something to this process alone."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def of(self, headers: Mapping[str, str], salt: str = "") -> str:
        """By the client's key and its salt, whichever there is; empty = it has neither."""
        authorization = headers.get("authorization", "")
        if not (authorization or salt):
            return ""
        # With its length before it, no key and salt are those of others.
        text = f"{len(authorization)} {authorization}{salt}"
        return blake2b(text.encode(), digest_size=8, key=self._key).hexdigest()
