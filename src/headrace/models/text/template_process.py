"""The owner's side of a chat template's worker: start it, ask it, end it when it is late.

Nothing that a template does can take longer than its limit or use memory of this process: a worker
is killed at its deadline, and frames that are longer than allowed are never read.
"""

import os.path
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from threading import Lock

from headrace.models.text.template_wire import (
    HEADER_BYTES,
    MAX_ERROR_BYTES,
    Kind,
    Limits,
    frame,
    parsed_header,
    to_bytes,
    to_text,
)

# A worker sees the paths of this process, and nothing of its environment's variables for Python.
_RUN = (
    "import sys; sys.path[:] = sys.argv[1:];"
    " from headrace.models.text.template_worker import main; main()"
)
_PACKAGE_ROOT = str(Path(__file__).parents[3])


class WorkerLate(Exception):
    """There was no answer in time."""


class WorkerLost(Exception):
    """The worker could not be started, ended, or said what it should not."""


@dataclass(frozen=True, slots=True)
class Reply:
    kind: Kind
    text: str


class _Worker:
    """One process. Not thread-safe."""

    def __init__(self) -> None:
        """OSError where there can be no process."""
        self.is_ready = False
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                # A session of its own: a terminal's Ctrl-C and hang-up are its owner's.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _RUN, *_paths()],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, kind: Kind, payload: bytes, deadline_s: float) -> None:
        self._socket.settimeout(_left(deadline_s))
        self._socket.sendall(frame(kind, payload))

    def receive(self, max_bytes: int, deadline_s: float) -> Reply:
        kind, num_bytes = parsed_header(self._exactly(HEADER_BYTES, deadline_s))
        if num_bytes > (max_bytes if kind is Kind.TEXT else MAX_ERROR_BYTES):
            raise WorkerLost(f"a frame of {num_bytes} bytes")
        return Reply(kind, to_text(self._exactly(num_bytes, deadline_s)))

    def _exactly(self, num_bytes: int, deadline_s: float) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            self._socket.settimeout(_left(deadline_s))
            num_received = self._socket.recv_into(view)
            if not num_received:
                raise WorkerLost(f"it ended with status {self._status()}")
            view = view[num_received:]
        return data

    def _status(self) -> int | None:
        try:
            return self._process.wait(1)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """From any thread; whoever waits for an answer sees the end of the stream."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


class TemplateProcess:
    """A worker that compiles `source` and renders it, and another one after each that is lost.

    Thread-safe; one rendering at a time, the others wait for their turn.
    """

    def __init__(self, source: str, limits: Limits) -> None:
        """Does not wait for the worker. OSError where there can be no process."""
        self._limits = limits
        self._source = to_bytes(dumps({"source": source, "limits": asdict(limits)}))
        self._lock = Lock()
        self._is_closed = False
        self._worker: _Worker | None = None
        self._start_worker()

    @property
    def pid(self) -> int | None:
        """Of the worker there is now."""
        worker = self._worker
        return None if worker is None else worker.pid

    def start(self) -> Reply:
        """READY, or why there is no template. WorkerLate, WorkerLost."""
        with self._lock, self._exchange() as worker:
            return self._started(worker)

    def render(self, names: bytes) -> Reply:
        """What becomes of the names of one rendering, as JSON. WorkerLate, WorkerLost."""
        # Python's objects take a multiple of their JSON.
        if len(names) > self._limits.memory_bytes // 8:
            return Reply(Kind.NO_MEMORY, "")
        with self._lock, self._exchange() as worker:
            reply = self._started(worker)
            if reply.kind is Kind.READY:
                deadline_s = _now_s() + self._limits.render_s
                worker.send(Kind.RENDER, names, deadline_s)
                max_chars = self._limits.max_output_chars(len(names))
                reply = worker.receive(4 * max_chars, deadline_s)
            if reply.kind is Kind.NO_MEMORY:
                self._replace_worker()
            return reply

    def close(self) -> None:
        """End the worker, whatever it does. Idempotent, from any thread."""
        self._is_closed = True
        if (worker := self._worker) is not None:
            worker.kill()
        with self._lock:
            self._end_worker()

    @contextmanager
    def _exchange(self) -> Iterator[_Worker]:
        """The worker, for one question. One that is left without its answer is replaced at once,
        so that the next question need not wait for all of the start; so is one that somebody has
        ended while it waited for a question.
        """
        try:
            if self._worker is not None and self._worker.has_ended:
                self._replace_worker()
            yield self._worker or self._start_worker()
        except BaseException as error:
            self._replace_worker()
            match error:
                case TimeoutError():
                    raise WorkerLate from None
                case OSError() | ValueError():
                    raise WorkerLost(str(error)) from None
                case _:
                    raise

    def _started(self, worker: _Worker) -> Reply:
        if not worker.is_ready:
            reply = worker.receive(0, _now_s() + self._limits.start_s)
            if reply.kind is not Kind.READY:
                self._replace_worker()
                return reply
            worker.is_ready = True
        return Reply(Kind.READY, "")

    def _start_worker(self) -> _Worker:
        if self._is_closed:
            raise WorkerLost("it is closed")
        worker = self._worker = _Worker()
        # Whether it took this is seen in what it answers.
        with suppress(OSError):
            worker.send(Kind.START, self._source, _now_s() + self._limits.start_s)
        return worker

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def _replace_worker(self) -> None:
        self._end_worker()
        # Where there can be none now, the next question tries again.
        with suppress(OSError, WorkerLost):
            self._start_worker()


def _paths() -> list[str]:
    """Where this process finds modules, and so where a worker finds Jinja and headrace."""
    return [os.path.abspath(path) for path in sys.path] + [_PACKAGE_ROOT]


def _now_s() -> float:
    # A limit on what another process may take needs a clock; nothing is decided by it otherwise.
    return time.monotonic()  # noqa: TID251


def _left(deadline_s: float) -> float:
    """Never 0, which would mean something else to a socket."""
    return max(deadline_s - _now_s(), 1e-3)
