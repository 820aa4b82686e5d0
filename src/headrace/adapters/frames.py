"""Frames: what comes out of a stream of bytes are whole messages again, or the stream is refused.

A frame is a length (unsigned 32-bit, little endian), a tag and that many bytes. The tag is AES-GMAC
(NIST SP 800-38D) over the bytes, with the frame's number as its nonce, so a frame that was forged,
changed, repeated, left out or put elsewhere ends the stream. Each direction of each stream has a
key of its own, so no nonce comes twice. Decides whether bytes are a frame; refuses to know what it
says.
"""

import hmac
import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from headrace.core.base.errors import TransferError
from headrace.core.config.units import size_text

MAX_FRAME_BYTES: Final = 64 << 20
_TAG_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_HEADER: Final = struct.Struct(f"<I{_TAG_BYTES}s")
HEADER_BYTES: Final = _HEADER.size


def direction_key(secret: bytes, direction: str) -> bytes:
    """The key of the frames that go one way of one stream, whose secret nothing else has;
    `direction` has at most 16 ASCII letters.
    """
    return blake2b(key=secret[:64], person=direction.encode(), digest_size=32).digest()


class FrameWriter:
    """Frames for one direction of one stream, in the order they are to be sent."""

    def __init__(self, key: bytes) -> None:
        self._tags = _Tags(key)

    def header(self, payload: bytes | memoryview) -> bytes:
        """What goes before these bytes. TransferError where they are more than a frame may hold."""
        if len(payload) > MAX_FRAME_BYTES:
            raise TransferError(
                f"a message of {len(payload)} bytes is longer than {size_text(MAX_FRAME_BYTES)}"
            )
        return _HEADER.pack(len(payload), self._tags.next(payload))

    def take_back(self) -> None:
        """The last header was shown to nobody, and never will be: the next one has its number."""
        self._tags.count -= 1

    def frame(self, payload: bytes) -> bytes:
        return self.header(payload) + payload


class FrameReader:
    """Takes bytes as they come, gives whole payloads in order. After an error it is of no use."""

    def __init__(self, key: bytes, first_most: int = MAX_FRAME_BYTES) -> None:
        """Until the first frame has come, of so many bytes at most, its sender may be anybody."""
        self._tags = _Tags(key)
        self._first_most = first_most
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that these bytes complete. TransferError for what is no frame of ours."""
        self._bytes += data
        payloads, start = [], 0
        while len(self._bytes) - start >= HEADER_BYTES:
            begin = start + HEADER_BYTES
            length, tag = self.open(bytes(self._bytes[start:begin]))
            end = begin + length
            if len(self._bytes) < end:
                break
            payload = bytes(self._bytes[begin:end])
            self.check(tag, payload)
            payloads.append(payload)
            start = end
        del self._bytes[:start]
        return payloads

    def open(self, header: bytes) -> tuple[int, bytes]:
        """How many bytes come behind this header, and the tag that they have to have."""
        length, tag = _HEADER.unpack(header)
        most = MAX_FRAME_BYTES if self._tags.count else self._first_most
        if length > most:
            raise TransferError(f"a frame of {length} bytes is longer than {size_text(most)}")
        return length, tag

    def check(self, tag: bytes, payload: bytes | memoryview) -> None:
        """TransferError unless the next frame's bytes are these."""
        self._compare(tag, self._tags.next(payload))

    def check_parts(self, tag: bytes, parts: Iterable[memoryview]) -> None:
        """As `check`, of bytes that come one part after another: each counts while a core's cache
        still has it.
        """
        self._compare(tag, self._tags.next_of(parts))

    def _compare(self, tag: bytes, right: bytes) -> None:
        if not hmac.compare_digest(tag, right):
            raise TransferError(f"frame {self._tags.count - 1} is not authentic")


class _Tags:
    """The tags of one frame after another."""

    def __init__(self, key: bytes) -> None:
        # Here, since a server without workers need not wait for this import.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._key = key
        self.count = 0

    def next(self, payload: bytes | memoryview) -> bytes:
        # Nothing is encrypted: with an empty text, GCM is a code over the bytes beside it.
        return self._cipher.encrypt(self._nonce(), b"", payload)

    def next_of(self, parts: Iterable[memoryview]) -> bytes:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        cipher = Cipher(algorithms.AES(self._key), modes.GCM(self._nonce())).encryptor()
        for part in parts:
            cipher.authenticate_additional_data(part)
        cipher.finalize()
        return cipher.tag

    def _nonce(self) -> bytes:
        nonce = self.count.to_bytes(_NONCE_BYTES, "little")
        self.count += 1
        return nonce
