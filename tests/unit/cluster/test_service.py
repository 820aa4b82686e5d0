"""What a worker does for a front end that it cannot serve, or no longer hears."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from headrace.adapters.frames import FrameReader, FrameWriter, direction_key
from headrace.cluster.shared import SharedEngine
from headrace.cluster.wire import (
    FROM_WORKER,
    PROTOCOL,
    TO_WORKER,
    Beat,
    Configure,
    FromWorker,
    Submit,
    ToWorker,
    Unfit,
    decode_from_worker,
    encode,
)
from headrace.cluster.worker import LEASE_TIMEOUTS, Service
from headrace.cluster.worker_line import WorkerLine
from headrace.core.base.errors import ConfigError, TransferError
from headrace.core.base.types import Ns
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config, ModelConfig
from headrace.live.boot import AsWorker

SECRET = b"sixteen letters!"


class Front:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.line = WorkerLine(ours, SECRET)
        self.stream = theirs
        self.stream.settimeout(20)
        self._owned = ours
        self._reader = FrameReader(direction_key(SECRET, FROM_WORKER))
        self._writer = FrameWriter(direction_key(SECRET, TO_WORKER))

    def say(self, message: ToWorker) -> None:
        self.stream.sendall(self._writer.frame(encode(message)))

    def hear(self) -> FromWorker:
        """The next word that is no beat."""
        while True:
            for payload in self._reader.feed(self.stream.recv(1 << 16)):
                message = decode_from_worker(payload)
                if not isinstance(message, Beat):
                    return message

    def close(self) -> None:
        self.stream.close()
        self._owned.close()


@pytest.fixture
def front() -> Iterator[Front]:
    with closing(Front()) as front:
        yield front


@pytest.fixture
def engine() -> Iterator[SharedEngine]:
    with closing(SharedEngine(AsWorker())) as engine:
        yield engine


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_another_protocol_is_refused_before_anything_is_loaded(
    engine: SharedEngine, front: Front, protocol: int
) -> None:
    front.say(Configure(protocol=protocol, config=Config()))
    with pytest.raises(ConfigError, match=f"protocol {protocol}, this worker {PROTOCOL}"):
        Service(engine, front.line).run()
    word = front.hear()
    assert isinstance(word, Unfit)
    assert "run the same version" in word.hint


def test_nothing_is_done_for_whoever_does_not_configure_first(
    engine: SharedEngine, front: Front
) -> None:
    front.say(Submit((), Ns(0)))
    with pytest.raises(TransferError, match="must be configured first"):
        Service(engine, front.line).run()


def test_what_cannot_be_loaded_is_told(engine: SharedEngine, front: Front) -> None:
    front.say(Configure(config=Config(model=ModelConfig(path="nowhere/at/all.gguf"))))
    with pytest.raises(ConfigError):
        Service(engine, front.line).run()
    # Nobody says any more that this worker lives: who did would keep an engine at the end.
    assert all(thread.name != "headrace-beat" for thread in threading.enumerate())
    word = front.hear()
    assert isinstance(word, Unfit)
    assert "nowhere" in word.message


def test_a_front_end_that_says_nothing_is_let_go(
    engine: SharedEngine, front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(Config(), cluster=ClusterConfig(silence_timeout_s=1.0))
    is_loading = threading.Event()

    def load_for_ever(*args: object) -> None:
        is_loading.set()
        # Its silence is longer than the lease at once, and the line is cut.
        monkeypatch.setattr(WorkerLine, "silence_s", LEASE_TIMEOUTS + 0.1)
        while front.line.receive():
            pass

    monkeypatch.setattr(engine, "enter", load_for_ever)
    front.say(Configure(config=config))
    with pytest.raises(EOFError):
        Service(engine, front.line, is_leased=True).run()
    assert is_loading.is_set()
