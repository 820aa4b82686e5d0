"""Frames: what comes out of a stream of bytes are whole messages again, or the stream is refused.

A frame is a length (unsigned 32-bit, little endian), a tag and that many bytes. The tag is a keyed
BLAKE2b over the frame's number and its bytes, so a frame that was forged, changed, repeated, left
out or put elsewhere ends the stream. Each direction has a key of its own, drawn from the secret.
Decides whether bytes are a frame; refuses to know what it says.
"""

import hmac
import struct
from hashlib import blake2b
from typing import Final

from headrace.core.base.errors import TransferError
from headrace.core.config.units import size_text

MAX_FRAME_BYTES: Final = 64 << 20
_TAG_BYTES: Final = 16
_HEADER: Final = struct.Struct(f"<I{_TAG_BYTES}s")


def direction_key(secret: bytes, direction: str) -> bytes:
    """The key of the frames that go one way; `direction` has at most 16 ASCII letters."""
    return blake2b(key=secret[:64], person=direction.encode(), digest_size=32).digest()


class FrameWriter:
    """Frames for one direction of one stream, in the order they are to be sent."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def frame(self, payload: bytes) -> bytes:
        """TransferError where the payload is longer than a frame may be."""
        if len(payload) > MAX_FRAME_BYTES:
            raise TransferError(
                f"a message of {len(payload)} bytes is longer than {size_text(MAX_FRAME_BYTES)}"
            )
        tag = _tag(self._key, self._count, payload)
        self._count += 1
        return _HEADER.pack(len(payload), tag) + payload


class FrameReader:
    """Takes bytes as they come, gives whole payloads in order. After an error it is of no use."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that these bytes complete. TransferError for what is no frame of ours."""
        self._bytes += data
        payloads, start = [], 0
        while len(self._bytes) - start >= _HEADER.size:
            length, tag = _HEADER.unpack_from(self._bytes, start)
            if length > MAX_FRAME_BYTES:
                raise TransferError(
                    f"a frame of {length} bytes is longer than {size_text(MAX_FRAME_BYTES)}"
                )
            end = start + _HEADER.size + length
            if len(self._bytes) < end:
                break
            payload = bytes(self._bytes[start + _HEADER.size : end])
            if not hmac.compare_digest(tag, _tag(self._key, self._count, payload)):
                raise TransferError(f"frame {self._count} is not authentic")
            payloads.append(payload)
            self._count += 1
            start = end
        del self._bytes[:start]
        return payloads


def _tag(key: bytes, count: int, payload: bytes) -> bytes:
    tag = blake2b(count.to_bytes(8, "little"), key=key, digest_size=_TAG_BYTES)
    tag.update(payload)
    return tag.digest()
