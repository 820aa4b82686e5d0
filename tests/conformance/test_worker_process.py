"""Every kind of worker process does what a fleet relies on, whoever has begun it."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from headrace.cluster.door import Door
from headrace.cluster.placement.process import Awaited, Launcher
from headrace.cluster.process import LocalProcess, WorkerProcess
from headrace.cluster.wire import Beat, Configure, FromWorker, Loading, Ready, Unfit
from headrace.core.base.errors import TransferError
from headrace.core.base.types import Ns
from headrace.core.base.worker import Role
from headrace.core.config.schema import Config, DeviceConfig, KvConfig, ModelConfig
from support.placement import ProcessPlacer
from support.tiny_model import BLOCK_BYTES, write_tiny_model

pytest.importorskip("headrace.ops.native._native")

WAIT_S = 30.0
SECRET = b"a secret of the test's"


class Rig:
    """One life of a worker, and the door that it may come to."""

    def __init__(self, process: WorkerProcess, door: Door | None, pid: Callable[[], int]) -> None:
        self.process = process
        self.pid = pid
        self._door = door

    def hear(self, is_last: Callable[[FromWorker], bool]) -> list[FromWorker]:
        """Everything up to such a message."""
        heard: list[FromWorker] = []
        deadline = time.monotonic() + WAIT_S
        while not (heard and is_last(heard[-1])):
            assert time.monotonic() < deadline, heard
            ready, _, _ = select.select([self.process], [], [], 0.02)
            if ready:
                heard += self.process.receive()
            if self.process.has_unsent:
                self.process.flush()
            if isinstance(self.process, Awaited) and self._door is not None:
                self._let_in(self.process, self._door)
        return heard

    def _let_in(self, awaited: Awaited, door: Door) -> None:
        door.accept(Ns(time.monotonic_ns()))
        for guest in list(door):
            worker = door.listen(guest)
            if worker is not None:
                process, hello = worker
                assert hello.ticket == awaited.ticket
                self.process = awaited.arrive(process)


@contextmanager
def local() -> Iterator[Rig]:
    process = LocalProcess()
    try:
        yield Rig(process, None, lambda: process.pid)
    finally:
        process.kill()
        process.wait(WAIT_S)


@contextmanager
def placed() -> Iterator[Rig]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    placer = ProcessPlacer()
    launch = Launcher(
        placer, front=listener.getsockname()[:2], secret=SECRET, num_cpus=1, timeout_s=WAIT_S
    )
    with closing(Door(listener, SECRET)) as door, closing(placer):
        rig = Rig(launch("w0", Role.MIXED), door, lambda: placer.pids[0])
        yield rig
        rig.process.kill()


@pytest.fixture(params=[local, placed], ids=lambda kind: kind.__name__)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with request.param() as rig:
        yield rig


def configure(path: Path) -> Configure:
    return Configure(
        config=Config(
            model=ModelConfig(path=str(path)),
            device=DeviceConfig(threads=1),
            kv=KvConfig(memory_bytes=64 * BLOCK_BYTES),
        )
    )


def is_ready(message: FromWorker) -> bool:
    return isinstance(message, Ready)


def test_what_is_sent_before_it_is_there_reaches_it(rig: Rig, tmp_path: Path) -> None:
    rig.process.send(configure(write_tiny_model(tmp_path / "tiny.gguf")))
    heard = rig.hear(is_ready)
    assert all(isinstance(one, Beat | Loading | Ready) for one in heard)
    assert rig.process.exit_status() is None
    assert not rig.process.wait(0)
    # It lives on, and says so.
    assert rig.hear(lambda message: isinstance(message, Beat) and message.stats is not None)

    rig.process.close()
    assert rig.process.wait(WAIT_S)
    assert rig.process.exit_status() == "exit code 0"
    rig.process.kill()  # changes nothing
    assert rig.process.exit_status() == "exit code 0"


def test_a_worker_that_cannot_serve_says_why(rig: Rig, tmp_path: Path) -> None:
    rig.process.send(configure(tmp_path / "nothing.gguf"))
    last = rig.hear(lambda message: isinstance(message, Unfit))[-1]
    assert isinstance(last, Unfit)
    assert "nothing.gguf" in last.message


def test_it_can_be_killed_before_it_is_there(rig: Rig) -> None:
    rig.process.kill()
    assert rig.process.wait(WAIT_S)
    assert rig.process.exit_status() is not None


def test_it_can_be_killed_where_it_is_stopped(rig: Rig, tmp_path: Path) -> None:
    rig.process.send(configure(write_tiny_model(tmp_path / "tiny.gguf")))
    rig.hear(is_ready)
    os.kill(rig.pid(), signal.SIGSTOP)
    rig.process.kill()
    assert rig.process.wait(WAIT_S)
    assert rig.process.exit_status() == "signal 9"


def test_its_end_is_heard(rig: Rig, tmp_path: Path) -> None:
    rig.process.send(configure(write_tiny_model(tmp_path / "tiny.gguf")))
    rig.hear(is_ready)
    os.kill(rig.pid(), signal.SIGKILL)
    with pytest.raises((EOFError, TransferError)):
        rig.hear(lambda message: False)
    assert rig.process.wait(WAIT_S)
    assert rig.process.exit_status() == "signal 9"
