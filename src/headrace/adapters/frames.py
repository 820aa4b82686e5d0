"""Frames: what comes out of a stream of bytes are whole messages again, or the stream is refused.

A frame is a length (unsigned 32-bit, little endian), a tag and that many bytes. The tag is AES-GMAC
(NIST SP 800-38D) over the bytes, with the frame's number as its nonce, so a frame that was forged,
changed, repeated, left out or put elsewhere ends the stream. Each direction of each stream has a
key of its own, so no nonce comes twice. Decides whether bytes are a frame; refuses to know what it
says.

What is long is hashed by the native backend where the processor can do it in half the time that
`cryptography` needs; the cipher is always `cryptography`'s.
"""

import hmac
import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from headrace.core.base.errors import TransferError
from headrace.core.config.units import size_text
from headrace.ops.native import _native

MAX_FRAME_BYTES: Final = 64 << 20
LONG_BYTES: Final = 4096  # from here on the hash is what takes the time
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

    def receive(self, tag: bytes, fd: int, view: memoryview, patience_ms: int) -> bool:
        """Fill the view from a socket and check it, with other threads going on until it is whole.
        False, with nothing taken, where this processor cannot. TransferError as above, EOFError
        where the stream ends, OSError where not all comes within `patience_ms` or the stream broke.
        """
        right = self._tags.next_received(fd, view, patience_ms)
        if right is not None:
            self._compare(tag, right)
        return right is not None

    def _compare(self, tag: bytes, right: bytes) -> None:
        if not hmac.compare_digest(tag, right):
            raise TransferError(f"frame {self._tags.count - 1} is not authentic")


def has_own_hash() -> bool:
    """Whether the native backend hashes here: the processor has the instructions, and what is
    built is not older than this source, as where that can be edited it may be.
    """
    return hasattr(_native, "Ghash") and _native.Ghash.can_run()


class _Tags:
    """The tags of one frame after another."""

    def __init__(self, key: bytes) -> None:
        # Here, since a server without workers need not wait for this import.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._key = key
        self._hash: _Hash | None = None
        self.count = 0

    def next(self, payload: bytes | memoryview) -> bytes:
        if len(payload) >= LONG_BYTES and (own := self._own_hash()) is not None:
            return own.tag(self._nonce(), own.ghash.of(payload))
        # Nothing is encrypted: with an empty text, GCM is a code over the bytes beside it.
        return self._cipher.encrypt(self._nonce(), b"", payload)

    def next_of(self, parts: Iterable[memoryview]) -> bytes:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        cipher = Cipher(algorithms.AES(self._key), modes.GCM(self._nonce())).encryptor()
        for part in parts:
            cipher.authenticate_additional_data(part)
        cipher.finalize()
        return cipher.tag

    def next_received(self, fd: int, view: memoryview, patience_ms: int) -> bytes | None:
        own = self._own_hash()
        if own is None:
            return None
        return own.tag(self._nonce(), own.ghash.receive(fd, view, patience_ms))

    def _own_hash(self) -> "_Hash | None":
        if self._hash is None and has_own_hash():
            self._hash = _Hash(self._key)
        return self._hash

    def _nonce(self) -> bytes:
        nonce = self.count.to_bytes(_NONCE_BYTES, "little")
        self.count += 1
        return nonce


class _Hash:
    """GMAC in its two parts, as NIST SP 800-38D puts it together for nonces of 12 bytes: GHASH
    under a subkey, which is zeros encrypted, hidden by the nonce and a 1 encrypted.
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        # Single blocks of AES, as GCM itself is made of.
        self._cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        self.ghash = _native.Ghash(self._cipher.update(bytes(_TAG_BYTES)))

    def tag(self, nonce: bytes, ghash: bytes) -> bytes:
        mask = self._cipher.update(nonce + b"\0\0\0\1")
        number = int.from_bytes(mask, "little") ^ int.from_bytes(ghash, "little")
        return number.to_bytes(_TAG_BYTES, "little")
