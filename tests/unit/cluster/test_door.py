"""Who comes in: whoever knows the secret, and nobody else costs anything."""

import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, suppress

import msgspec
import pytest

from headrace.adapters.frames import (
    MAX_FRAME_BYTES,
    FrameReader,
    FrameWriter,
    direction_key,
)
from headrace.adapters.handshake import GREETING_BYTES, greeting, read_secret, stream_secret
from headrace.cluster.door import MAX_GUESTS, MAX_HELLO_BYTES, REST_NS, Door
from headrace.cluster.process import RemoteProcess
from headrace.cluster.remote import address_of
from headrace.cluster.switchboard import Switchboard
from headrace.cluster.wire import (
    FROM_WORKER,
    TO_WORKER,
    Beat,
    Configure,
    FromWorker,
    Hello,
    decode_to_worker,
    encode,
)
from headrace.core.base.errors import ConfigError
from headrace.core.base.types import Ns
from headrace.core.base.worker import Role

SECRET = b"sixteen letters!"
HELLO = Hello(name="box", role=Role.DECODE)


@pytest.fixture
def door() -> Iterator[Door]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    with closing(Door(listener, SECRET)) as door:
        yield door


def call(door: Door) -> socket.socket:
    with socket.socket(fileno=socket.dup(door.fileno())) as listener:
        stream = socket.create_connection(listener.getsockname(), timeout=5)
    door.accept(Ns(0))
    return stream


def frames(secret: bytes, *messages: FromWorker) -> bytes:
    writer = FrameWriter(direction_key(secret, FROM_WORKER))
    return b"".join(writer.frame(encode(message)) for message in messages)


def says(door: Door, stream: socket.socket, data: bytes) -> tuple[RemoteProcess, Hello] | None:
    """What the door makes of it; every guest is listened to until nothing is left."""
    stream.sendall(data)
    for _ in range(20):
        for guest in list(door):
            worker = door.listen(guest)
            if worker is not None:
                return worker
    return None


def introduce(door: Door, stream: socket.socket, secret: bytes, *messages: FromWorker) -> bytes:
    theirs = stream.recv(GREETING_BYTES)
    ours = greeting()
    return ours + frames(stream_secret(secret, theirs, ours), *messages)


def test_whoever_knows_the_secret_is_a_worker(door: Door) -> None:
    with call(door) as stream:
        data = introduce(door, stream, SECRET, HELLO)
        assert says(door, stream, data[:20]) is None
        worker = says(door, stream, data[20:])
    assert worker is not None
    process, hello = worker
    assert hello == HELLO
    assert not list(door)
    process.close()


@pytest.mark.parametrize(
    "secret_and_messages",
    [
        (b"another secret!!", (HELLO,)),
        (SECRET, (Beat(),)),
        (SECRET, (HELLO, Beat())),
        *((SECRET, (Hello(name=name),)) for name in ("", "a\r\nx: y", "a b", "ü", "n" * 65)),
    ],
)
def test_others_are_shown_out(
    door: Door, secret_and_messages: tuple[bytes, tuple[FromWorker, ...]]
) -> None:
    secret, messages = secret_and_messages
    with call(door) as stream:
        assert says(door, stream, introduce(door, stream, secret, *messages)) is None
        assert not list(door)


def test_another_versions_worker_is_told_which_one_this_is(door: Door) -> None:
    """Whatever else its hello has: it reads the stamp of what it is sent, and comes no more."""
    with call(door) as stream:
        theirs, ours = stream.recv(GREETING_BYTES), greeting()
        secret = stream_secret(SECRET, theirs, ours)
        hello = msgspec.msgpack.encode({"type": "Hello", "protocol": 1 << 20, "called": ["box"]})
        writer = FrameWriter(direction_key(secret, FROM_WORKER))
        assert says(door, stream, ours + writer.frame(hello)) is None
        assert not list(door)
        (payload,) = FrameReader(direction_key(secret, TO_WORKER)).feed(stream.recv(1 << 16))
    assert isinstance(decode_to_worker(payload), Configure)


def test_so_is_whoever_says_what_another_one_said(door: Door) -> None:
    with call(door) as stream, call(door) as copy:
        data = introduce(door, stream, SECRET, HELLO)
        copy.recv(GREETING_BYTES)
        assert says(door, copy, data) is None
        worker = says(door, stream, data)
        assert worker is not None
        worker[0].close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\x80\x05" * 90, b"\0" * 99])
def test_and_whoever_speaks_another_language(door: Door, data: bytes) -> None:
    with call(door) as stream:
        assert says(door, stream, data) is None
        assert not list(door)


@pytest.mark.parametrize("num_bytes", [MAX_HELLO_BYTES + 1, MAX_FRAME_BYTES])
def test_and_whoever_begins_with_a_long_message(door: Door, num_bytes: int) -> None:
    """Before it has come, since nobody knows yet who sends it."""
    with call(door) as stream:
        data = introduce(door, stream, SECRET, HELLO)[:GREETING_BYTES]
        assert says(door, stream, data + struct.pack("<I16s", num_bytes, b"")) is None
        assert not list(door)


def test_those_who_say_nothing_have_to_go(door: Door) -> None:
    streams = [call(door) for _ in range(MAX_GUESTS + 3)]
    assert len(list(door)) == MAX_GUESTS
    for guest in door:
        guest.until_s = 0.0
    door.close_late()
    assert not list(door)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS])
def test_without_descriptors_it_rests_and_says_so_once(
    number: int, door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits outside keeps the listener readable all the time."""
    accept, is_out = socket.socket.accept, True

    def scarce(listener: socket.socket) -> object:
        if is_out:
            raise OSError(number, "there are no more")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with closing(Switchboard()) as board, call(door):
        now = REST_NS  # of the first time
        for _ in range(3):
            board.follow(now, (), door)
            assert board.wait(5.0) == [door]
            door.accept(now)
            board.follow(now, (), door)
            assert not board.wait(0.0)
            until = door.rests_until(now)
            assert until == now + REST_NS
            now = until
        assert [record.getMessage() for record in caplog.records] == [
            "no worker can come in for now: there are no more"
        ]
        is_out = False
        board.follow(now, (), door)
        assert board.wait(5.0) == [door]
        door.accept(now)
        assert len(list(door)) == 1


def test_whoever_has_left_again_costs_no_rest(door: Door) -> None:
    with suppress(BlockingIOError):
        door.accept(Ns(5))  # nobody is there
    assert door.rests_until(Ns(5)) is None


def test_a_secret_is_long_and_in_a_file(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "secret"
    file.write_bytes(b"  " + SECRET + b"\n")
    assert read_secret(str(file)) == SECRET
    file.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="secret of 5 bytes is shorter than 16"):
        read_secret(str(file))
    with pytest.raises(ConfigError, match="need a secret"):
        read_secret("")


def test_addresses() -> None:
    assert address_of("10.0.0.5:7000") == ("10.0.0.5", 7000)
    assert address_of("[::1]:1") == ("::1", 1)
    for bad in ("", "host", ":5", "host:", "host:70000", "host:x"):
        with pytest.raises(ConfigError, match="is no HOST:PORT"):
            address_of(bad)
