"""GHASH in one go and as bytes come over a socket, against the tags of `cryptography`."""

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from headrace.adapters.frames import has_own_hash
from headrace.ops.native import _native

pytestmark = pytest.mark.skipif(not has_own_hash(), reason="this processor has no VPCLMULQDQ")

KEY, NONCE = bytes(range(32)), bytes(12)
PATIENCE_MS = 10_000


def encrypted(key: bytes, block: bytes) -> bytes:
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)


def ghash(key: bytes = KEY) -> _native.Ghash:
    return _native.Ghash(encrypted(key, bytes(16)))


def right(data: bytes, key: bytes = KEY) -> bytes:
    """What `cryptography` has under the one block of AES that it hides it by."""
    tag = AESGCM(key).encrypt(NONCE, b"", data)
    mask = encrypted(key, NONCE + b"\0\0\0\1")
    return bytes(one ^ other for one, other in zip(tag, mask, strict=True))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        near.settimeout(PATIENCE_MS / 1000)
        with far:
            yield near, far


@pytest.mark.parametrize(
    "num_bytes",
    [*range(50), 255, 256, 257, 511, 512, 513, 4096, 70_001, (1 << 17) - 1, 1 << 17, 300_001],
)
def test_it_is_what_is_in_a_tag(num_bytes: int) -> None:
    rng = random.Random(num_bytes)
    for key in (rng.randbytes(32), rng.randbytes(16), bytes(32)):
        data = rng.randbytes(num_bytes)
        assert ghash(key).of(data) == right(data, key)
        assert ghash(key).of(memoryview(b"x" + data)[1:]) == right(data, key)  # wherever it lies
    assert ghash().of(bytes(num_bytes)) == right(bytes(num_bytes))
    assert ghash().of(b"\xff" * num_bytes) == right(b"\xff" * num_bytes)


def test_every_byte_counts() -> None:
    data = bytearray(random.Random(1).randbytes(600))
    seen = {ghash().of(data)}
    for place in range(len(data)):
        data[place] ^= 0x40
        seen.add(ghash().of(data))
        data[place] ^= 0x40
    assert len(seen) == 601


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_a_subkey_is_one_block(size: int) -> None:
    with pytest.raises(_native.Fault, match=f"a subkey has 16 bytes, got {size}"):
        _native.Ghash(bytes(size))


@pytest.mark.parametrize("num_bytes", [0, 1, 300, 1 << 17, (1 << 17) + 5, 3_000_001])
def test_what_comes_is_hashed_and_stays_in_its_place(
    pair: tuple[socket.socket, socket.socket], num_bytes: int
) -> None:
    near, far = pair
    data = random.Random(num_bytes).randbytes(num_bytes)
    target = bytearray(b"\xa5" * (num_bytes + 2))
    sending = threading.Thread(target=far.sendall, args=(data + b"rest",))
    sending.start()
    with memoryview(target) as view, view[1:-1] as inside:
        assert ghash().receive(near.fileno(), inside, PATIENCE_MS) == right(data)
    assert target == b"\xa5" + data + b"\xa5"
    # However few come next wake whoever waits for them.
    assert near.recv(4, socket.MSG_WAITALL) == b"rest"
    sending.join()


@pytest.mark.parametrize(("patience_ms", "is_whole"), [(PATIENCE_MS, True), (150, False)])
def test_bytes_that_come_one_by_one_are_waited_for_so_long_in_all(
    pair: tuple[socket.socket, socket.socket], patience_ms: int, is_whole: bool
) -> None:
    """Always too few to be worth waking."""
    near, far = pair
    is_over = threading.Event()

    def trickle() -> None:
        for letter in b"a few":
            is_over.wait(0.06)
            far.send(bytes([letter]))

    sending = threading.Thread(target=trickle)
    sending.start()
    if is_whole:
        assert ghash().receive(near.fileno(), bytearray(5), patience_ms) == right(b"a few")
    else:
        with pytest.raises(TimeoutError):
            ghash().receive(near.fileno(), bytearray(500), patience_ms)
    is_over.set()
    sending.join()


def test_silence_an_end_and_a_broken_stream_are_said(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    with pytest.raises(TimeoutError, match="timed out"):
        ghash().receive(near.fileno(), bytearray(9), 10)
    far.send(b"half")
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        ghash().receive(near.fileno(), bytearray(9), PATIENCE_MS)
    with pytest.raises(OSError, match="Bad file descriptor"):
        ghash().receive(-1, bytearray(9), PATIENCE_MS)
    with open(os.devnull, "rb") as file, pytest.raises(OSError, match="non-socket"):
        ghash().receive(file.fileno(), bytearray(9), PATIENCE_MS)
    with pytest.raises(BufferError):
        ghash().receive(near.fileno(), bytes(9), PATIENCE_MS)


def test_a_shutdown_ends_the_wait(pair: tuple[socket.socket, socket.socket]) -> None:
    near, _ = pair
    ends: list[BaseException] = []

    def wait() -> None:
        with suppress(EOFError):
            ghash().receive(near.fileno(), bytearray(1 << 20), PATIENCE_MS)
            return
        ends.append(EOFError())

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.02)
    near.shutdown(socket.SHUT_RDWR)
    waiting.join(5)
    assert len(ends) == 1
