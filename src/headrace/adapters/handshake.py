"""Who belongs to a cluster: both ends of a stream prove that they know its secret, and agree on
one for this stream.

Each end sends a greeting, 8 letters and 32 bytes that nobody can foresee; the stream's secret is a
keyed BLAKE2b of both. So a frame proves that its sender knows the secret, and none can be played
again on another stream.
"""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Final

from headrace.core.base.errors import ConfigError, TransferError
from headrace.models.files import read_bounded

MAGIC: Final = b"headrac2"
NONCE_BYTES: Final = 32
GREETING_BYTES: Final = len(MAGIC) + NONCE_BYTES
MIN_SECRET_BYTES: Final = 16


def read_secret(path: str) -> bytes:
    """The bytes of a file, white space at its ends apart. ConfigError where they are too few."""
    if not path:
        raise ConfigError(
            "workers of other machines need a secret",
            hint="--secret-file FILE, with the same content on all machines",
        )
    secret = read_bounded(Path(path).expanduser(), 4096).strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{path}: a secret of {len(secret)} bytes is shorter than {MIN_SECRET_BYTES}",
            hint="for instance: openssl rand -hex 32",
        )
    return secret


def greeting() -> bytes:
    return MAGIC + os.urandom(NONCE_BYTES)


def stream_secret(secret: bytes, front_greeting: bytes, worker_greeting: bytes) -> bytes:
    """TransferError where one of the greetings is none."""
    for one in (front_greeting, worker_greeting):
        if len(one) != GREETING_BYTES or not one.startswith(MAGIC):
            raise TransferError("whoever is at the other end is not of headrace")
    key = blake2b(secret).digest()
    return blake2b(front_greeting + worker_greeting, key=key, digest_size=64).digest()
