"""A worker process: one engine, driven by what a front end sends over a socket that it inherits.

    python -m headrace.cluster.worker FD

Decides nothing about requests; refuses to outlive the front end that it answers.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace

import msgspec

from headrace.adapters.frames import FrameReader, FrameWriter, direction_key
from headrace.cluster.wire import (
    FROM_WORKER,
    PROTOCOL,
    TO_WORKER,
    Audit,
    Audited,
    Beat,
    Configure,
    Dismiss,
    Failed,
    FromWorker,
    Loading,
    Ready,
    SendSnapshot,
    Snapshot,
    Submit,
    ToWorker,
    Turn,
    Unfit,
    Word,
    decode_to_worker,
    encode,
    load_of,
)
from headrace.core.base.errors import ConfigError, HeadraceError, TransferError
from headrace.core.base.events import (
    Admitted,
    Arrive,
    BlockRemoved,
    BlockStored,
    Cancel,
    Emit,
    EndLease,
    EngineEffect,
    EngineEvent,
    Finish,
    KvChanged,
    Preempted,
    Reject,
)
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.types import Ns
from headrace.core.config.resolve import MachineFacts
from headrace.core.telemetry import Counters, Telemetry
from headrace.live.boot import AsWorker, Booted, boot
from headrace.live.machine import machine_facts

_log = logging.getLogger(__name__)

BEAT_S = 0.25
COST_EVERY_BEATS = 20  # a worker whose steps are recorded says what they take
PR_SET_PDEATHSIG = 1  # of prctl(2)
LOAD_EVERY_NS = Ns(10_000_000)  # how often a turn tells the load, at most
_CHUNK_BYTES = 1 << 18


class WorkerLine:
    """The worker's end of the socket. Any thread may send; one receives."""

    def __init__(self, stream: socket.socket, secret: bytes) -> None:
        self._stream = stream
        self._writer = FrameWriter(direction_key(secret, FROM_WORKER))
        self._reader = FrameReader(direction_key(secret, TO_WORKER))
        self._sending = threading.Lock()

    def send(self, message: FromWorker) -> None:
        """Blocks while the front end does not read. OSError where it is gone."""
        payload = encode(message)
        with self._sending:
            self._stream.sendall(self._writer.frame(payload))

    def receive(self) -> list[ToWorker]:
        """What has come, after waiting for it. EOFError where the front end is gone."""
        data = self._stream.recv(_CHUNK_BYTES)
        if not data:
            raise EOFError
        return [decode_to_worker(payload) for payload in self._reader.feed(data)]


class Worker:
    """Tells what its engine does, turn by turn, and does what it is told."""

    def __init__(self, line: WorkerLine, booted: Booted) -> None:
        self._line = line
        self._engine = booted.engine
        self._telemetry = Telemetry(Slo(), booted.engine.cost)
        self._counters = Counters()
        self._words: list[Word] = []  # of the engine thread
        self._kv_no = 0
        self._cached: dict[bytes, None] = {}  # names of cached blocks, oldest first
        self._load_told_ns = Ns(0)
        self._num_received = 0  # requests that the engine knows of
        self._step_fit = booted.step_fit
        self._num_beats = 0
        self._engine.observe(self._observe)

    # ---- the front end's words, on the receiving thread

    def obey(self, message: ToWorker) -> None:
        match message:
            case Submit(seqs, sent_ns):
                shift = time.monotonic_ns() - sent_ns
                self._engine.submit([_shifted(spec, shift) for spec in seqs], self._hear)
            case Cancel(seq_id, reason):
                self._engine.cancel(seq_id, reason)
            case EndLease(seq_id):
                self._engine.end_lease(seq_id)
            case SendSnapshot():
                self._engine.call_soon(self._send_snapshot)
            case Audit(audit_id):
                threading.Thread(target=self._audit, args=(audit_id,), daemon=True).start()
            case Dismiss(reason):
                raise ConfigError(f"the front end does not want this worker: {reason}")
            case Configure():
                raise TransferError("a worker is configured once")

    def beat(self) -> None:
        cost = None
        if self._step_fit is not None and self._num_beats % COST_EVERY_BEATS == 0:
            cost = self._step_fit.cost()
        self._num_beats += 1
        self._line.send(Beat(self._engine.stats(), self._num_received, cost))

    def _audit(self, audit_id: int) -> None:
        try:
            self._engine.check()
            self._counters.check()
        except HeadraceError as error:
            self._line.send(Audited(audit_id, str(error)))
        else:
            self._line.send(Audited(audit_id, ""))

    # ---- the engine's words, on the engine thread

    def _hear(self, effect: EngineEffect) -> None:
        if isinstance(effect, Admitted | Emit | Preempted | Finish | Reject):
            self._words.append(effect)

    def _observe(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        if self._engine.failure is not None:
            # Its last words are not for clients: others will compute what it could not.
            self._tell(Failed(self._engine.failure))
            return
        self._counters.observe(event, effects)
        self._num_received += isinstance(event, Arrive)
        records = self._telemetry.observe(now, event, effects)
        first_no = self._kv_no
        changes: list[BlockStored | BlockRemoved] = []
        for effect in effects:
            if isinstance(effect, KvChanged):
                changes += effect.changes
        for change in changes:
            if isinstance(change, BlockStored):
                self._cached[change.name] = None
            else:
                del self._cached[change.name]
        self._kv_no += len(changes)
        words, self._words = tuple(self._words), []
        if not (words or changes):
            return
        load = None
        if now - self._load_told_ns >= LOAD_EVERY_NS:
            self._load_told_ns = now
            load = load_of(self._engine.stats())
        self._tell(
            Turn(
                words=words,
                records=tuple(records),
                kv_no=first_no,
                kv=tuple(changes),
                load=load,
                num_received=self._num_received,
            )
        )

    def _send_snapshot(self, now: Ns) -> None:
        self._tell(Snapshot(self._kv_no, tuple(self._cached)))

    def _tell(self, message: FromWorker) -> None:
        with suppress(OSError):  # whoever receives finds out, and ends the process
            self._line.send(message)


def _shifted(spec: SeqSpec, shift_ns: int) -> SeqSpec:
    """The same with its times on this process's clock."""
    deadline = None if spec.deadline_ns is None else Ns(spec.deadline_ns + shift_ns)
    return msgspec.structs.replace(
        spec, arrived_ns=Ns(spec.arrived_ns + shift_ns), deadline_ns=deadline
    )


def _beat(
    line: WorkerLine, workers: list[Worker], is_over: threading.Event, on_lost: Callable[[], None]
) -> None:
    """From the first moment on, so that silence always means trouble."""
    while not is_over.wait(BEAT_S):
        try:
            if workers:
                workers[0].beat()
            else:
                line.send(Beat())
        except OSError:  # the front end is gone
            if not workers:
                on_lost()
            return


def _configuration(line: WorkerLine) -> tuple[Configure, list[ToWorker]]:
    """The first message, and what came with it."""
    while not (messages := line.receive()):
        pass
    first, *rest = messages
    if not isinstance(first, Configure):
        raise TransferError("a worker must be configured first")
    if first.protocol != PROTOCOL:
        raise ConfigError(
            f"the front end speaks protocol {first.protocol}, this worker {PROTOCOL}",
            hint="run the same version of headrace on all machines",
        )
    return first, rest


def serve(
    line: WorkerLine,
    *,
    on_lost: Callable[[], None] = lambda: None,
    on_configured: Callable[[], None] = lambda: None,
    as_worker: AsWorker = AsWorker(),  # noqa: B008, which is frozen
) -> None:
    """Until the front end is gone, which is an EOFError or an OSError; `on_lost` hears of it at
    once while the model loads. What keeps the worker from serving is told as Unfit, and a
    ConfigError; so is it where the front end does not want it.
    """
    workers: list[Worker] = []
    is_over = threading.Event()
    threading.Thread(target=_beat, args=(line, workers, is_over, on_lost), daemon=True).start()
    try:
        _serve(line, workers, on_configured, as_worker)
    finally:
        is_over.set()


def _serve(
    line: WorkerLine,
    workers: list[Worker],
    on_configured: Callable[[], None],
    as_worker: AsWorker,
) -> None:
    try:
        asked, rest = _configuration(line)
        on_configured()
        logging.basicConfig(level=asked.config.telemetry.log_level.upper())
        booted = boot(
            asked.config,
            machine=shared_facts(asked.num_sharing),
            on_progress=lambda stage, done, total: line.send(Loading(stage, done, total)),
            worker=as_worker,
        )
    except ConfigError as error:
        line.send(Unfit(error.message, error.hint))
        raise
    with closing(booted):
        worker = Worker(line, booted)
        workers.append(worker)
        booted.loaded.close()  # the text is the front end's
        line.send(
            Ready(
                pid=os.getpid(),
                spec=booted.spec,
                config=booted.config,
                kv=booted.kv,
                kv_address=booted.kv_address,
                role=asked.role,
                cost=booted.engine.cost,
                description=booted.loaded.description,
            )
        )
        while True:
            for message in rest:
                worker.obey(message)
            rest = line.receive()


def shared_facts(num_sharing: int) -> MachineFacts:
    """What one of several equal workers may use of this machine."""
    facts = machine_facts()
    return replace(
        facts,
        num_cores=max(1, facts.num_cores // num_sharing),
        available_bytes=facts.available_bytes // num_sharing,
    )


def _end_with_parent() -> None:
    """Also where this process is stopped, and cannot see that nobody is there any more. Linux only;
    elsewhere the end of the socket has to do.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _end_with_parent()
    # A terminal's Ctrl-C, or its end, reaches the whole group; the front end decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stream = socket.socket(fileno=int(sys.argv[1]))
    try:
        # Nobody waits for what loads when the front end is gone.
        serve(WorkerLine(stream, secret=b""), on_lost=lambda: os._exit(0))
    except (EOFError, OSError):
        pass  # the front end is gone
    except ConfigError:
        sys.exit(2)  # the front end has been told, or told it
    except TransferError as error:
        _log.critical("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
