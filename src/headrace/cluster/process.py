"""A worker's process as the front end sees it: what was sent, what came, whether it still runs."""

import socket
import subprocess
import sys
from contextlib import suppress
from typing import Final, Protocol

from headrace.cluster.line import Line
from headrace.cluster.wire import FromWorker, ToWorker

WORKER: Final = "headrace.cluster.worker"


class WorkerProcess(Protocol):
    """One life of a worker. What it is to a Line, it is to whoever holds it."""

    @property
    def pid(self) -> int | None:
        """None where that would mean nothing on this machine."""
        ...

    @property
    def has_unsent(self) -> bool: ...

    def fileno(self) -> int: ...

    def send(self, message: ToWorker) -> None: ...

    def flush(self) -> None: ...

    def receive(self) -> list[FromWorker]: ...

    def close(self) -> None:
        """Let it end by itself: what it reads is at an end. Idempotent."""
        ...

    def kill(self) -> None:
        """End it at once, whatever it does, also where it is stopped. Idempotent."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within that time. The only call that may take time."""
        ...

    def exit_status(self) -> str | None:
        """How it has ended, for people; None while it runs."""
        ...


class LocalProcess(Line):
    """A WorkerProcess on this machine, over a pair of sockets that nobody else can reach."""

    def __init__(self, module: str = WORKER) -> None:
        """`module` runs as `python -m MODULE FD`, and does there what WORKER does."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        super().__init__(ours, secret=b"")

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self.close()
        with suppress(ProcessLookupError):
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_status(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class RemoteProcess(Line):
    """A WorkerProcess that has come by itself, from this machine or another. To kill it is not to
    listen to it any more: what ran there goes on elsewhere, and it may come again.
    """

    pid = None

    def kill(self) -> None:
        self.close()

    def sever(self) -> None:
        """Let `receive` find its end. From any thread, if nobody closes it at the same time."""
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s: float) -> bool:
        return True

    def exit_status(self) -> str | None:
        return "its connection"
