"""A front end that does not read keeps nobody from working, and is let go in the end."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.adapters.frames import FrameReader, FrameWriter, direction_key
from headrace.cluster import worker_line
from headrace.cluster.wire import (
    FROM_WORKER,
    TO_WORKER,
    Beat,
    Failed,
    FromWorker,
    Renew,
    Snapshot,
    ToWorker,
    decode_from_worker,
    encode,
)
from headrace.cluster.worker_line import WorkerLine

SECRET = b"sixteen letters!"
LONG = "x" * (1 << 16)


class FrontEnd:
    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._reader = FrameReader(direction_key(SECRET, FROM_WORKER))
        self._writer = FrameWriter(direction_key(SECRET, TO_WORKER))

    def read(self, num: int) -> list[FromWorker]:
        heard: list[FromWorker] = []
        while len(heard) < num:
            heard += map(decode_from_worker, self._reader.feed(self.stream.recv(1 << 16)))
        return heard

    def say(self, message: ToWorker) -> None:
        self.stream.sendall(self._writer.frame(encode(message)))


@pytest.fixture
def ends() -> Iterator[tuple[WorkerLine, FrontEnd]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    with ours, theirs:
        yield WorkerLine(ours, SECRET), FrontEnd(theirs)


def test_nobody_waits_for_a_front_end_that_does_not_read(
    ends: tuple[WorkerLine, FrontEnd],
) -> None:
    line, front = ends
    said = [Snapshot(number, (LONG.encode(),)) for number in range(200)]
    for message in said:
        line.send(message)  # 13 MB: more than any socket holds
    assert front.read(len(said)) == said
    line.send(Beat())
    assert front.read(1) == [Beat()]


def test_many_threads_say_whole_messages(ends: tuple[WorkerLine, FrontEnd]) -> None:
    line, front = ends

    def say(name: str) -> None:
        for number in range(30):
            line.send(Failed(f"{name} {number} {LONG}"))

    threads = [threading.Thread(target=say, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    heard = [str(message.reason).split()[:2] for message in front.read(90)]  # type: ignore[union-attr]
    for thread in threads:
        thread.join()
    for name in "abc":
        assert [number for who, number in heard if who == name] == [str(n) for n in range(30)]


def test_who_leaves_too_much_unread_is_let_go(
    ends: tuple[WorkerLine, FrontEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, _ = ends
    monkeypatch.setattr(worker_line, "MAX_UNSENT_BYTES", 1 << 20)
    with pytest.raises(OSError, match="cut"):
        _say_much(line)
    with pytest.raises(EOFError):
        line.receive()


def _say_much(line: WorkerLine) -> None:
    for _ in range(1000):
        line.send(Failed(LONG))


def test_what_comes_ends_the_silence_and_a_cut_ends_the_waiting(
    ends: tuple[WorkerLine, FrontEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, front = ends
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    assert line.silence_s > 1e6
    front.say(Renew())
    assert line.receive() == [Renew()]
    assert line.silence_s == 0
    waiting = threading.Thread(target=line.cut)
    waiting.start()
    with pytest.raises(EOFError):
        line.receive()
    waiting.join()
    with pytest.raises(OSError, match="cut"):
        line.send(Beat())
