"""The recorder of traffic: a file that `headrace sim` can serve again, without text and tokens.

Whoever serves hands over what came and what became of it; names are made and lines are written on a
thread of the recorder's own. What it cannot keep up with is counted and left out; a disk that is
full ends the recording, never the serving.
"""

import logging
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from headrace import __version__
from headrace.core.base.errors import ConfigError
from headrace.core.base.events import Arrive, Emit, EngineEffect, EngineEvent, Reject
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.telemetry import TelemetryConfig
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.recording import (
    KEY_BYTES,
    Begin,
    Line,
    Lost,
    Namer,
    PoolFacts,
    Pools,
    Recorded,
    encode_line,
    recorded,
)
from headrace.live.lost_recording import tell_end

_log = logging.getLogger(__name__)

MAX_WAITING_TOKENS: Final = 8 << 20  # that wait to be named; beyond, requests are left out
FIRST_LOOK_S: Final = 5.0  # at what is known of the workers; each pause is twice the last
LONGEST_PAUSE_S: Final = 600.0


MakeLine = Callable[[Namer], Recorded]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation has to know of whoever serves. `look` says what is known of the workers by
    now; any thread may call it.
    """

    begin: Begin
    look: Callable[[], tuple[PoolFacts, ...]]


class TrafficFile:
    """Lines, of which the newest are kept: when half of the limit is written, the file becomes
    FILE.1, in the place of an older one, and another one begins. Raises OSError as files do.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path, self._limit_bytes = path, limit_bytes // 2
        self._head: dict[type[Line], bytes] = {}  # what every file begins with
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if not stat.S_ISREG(path.stat().st_mode):
                raise OSError(0, "not a regular file")
            if path.stat().st_size:
                self._put_aside()  # what another run has recorded
        self._open()

    def write(self, line: Line) -> None:
        data = encode_line(line) + b"\n"
        if isinstance(line, Begin | Pools):
            self._head[type(line)] = data
        if self._num_bytes and self._num_bytes + len(data) > self._limit_bytes:
            self._file.close()
            self._put_aside()
            self._open()
            for head in self._head.values():
                self._append(head)
            if isinstance(line, Begin | Pools):
                return
        self._append(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _append(self, data: bytes) -> None:
        self._file.write(data)
        self._num_bytes += len(data)

    def _put_aside(self) -> None:
        self.path.replace(self.path.with_name(self.path.name + ".1"))

    def _open(self) -> None:
        # Lengths and times of somebody's requests are nobody else's business.
        self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
        self._num_bytes = 0


class TrafficRecorder:
    """Records from `begin` to `close`, and nothing before. Any thread may call any of it."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Raises OSError where the file cannot be begun."""
        self._file: TrafficFile | None = TrafficFile(path, limit_bytes)
        self._namer: Namer | None = None
        self._facts: Facts | None = None
        self._began_ns = Ns(0)
        self._gate = threading.Condition()  # over all that follows
        self._waiting: deque[tuple[MakeLine, int]] = deque()
        self._num_waiting_tokens = 0
        self._num_lost = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="headrace-traffic", daemon=True)

    @classmethod
    def of(cls, config: TelemetryConfig) -> "TrafficRecorder | None":
        """As configured; None = nobody wants a recording. Raises ConfigError."""
        if not config.record:
            return None
        try:
            return cls(Path(config.record).expanduser(), config.record_limit_bytes)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot record traffic: {reason}", path=config.record, hint="name another --record"
            ) from error

    def begin(self, facts: Facts) -> None:
        """Once. The key of this recording's names is made here, and ends with this process."""
        begin = msgspec.structs.replace(
            facts.begin,
            headrace_version=__version__,
            recording_id=secrets.token_hex(8),
            began_unix_s=round(time.time(), 3),
        )
        self._began_ns = Ns(time.monotonic_ns())
        self._facts = facts
        self._namer = Namer(secrets.token_bytes(KEY_BYTES), begin.block_tokens)
        self._put(begin)
        self._thread.start()

    @property
    def began_ns(self) -> Ns:
        return self._began_ns

    def add(self, make: MakeLine, num_tokens: int) -> None:
        """`make` makes a line that takes about as long as so many tokens are many."""
        with self._gate:
            if self._is_closed or self._file is None or self._namer is None:
                return
            if self._num_waiting_tokens > MAX_WAITING_TOKENS:
                self._num_lost += 1
                return
            self._waiting.append((make, num_tokens))
            self._num_waiting_tokens += num_tokens
            self._gate.notify()

    def close(self) -> None:
        """Write what waits, and what is known of the workers now. Idempotent."""
        with self._gate:
            self._is_closed = True
            self._gate.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._attempt(TrafficFile.close)
        self._file = None

    # ---- the recorder's thread

    def _run(self) -> None:
        pause_s, look_s = FIRST_LOOK_S, time.monotonic()
        last: tuple[PoolFacts, ...] = ()
        while True:
            is_closed, makes, num_lost = self._take(look_s - time.monotonic())
            if is_closed or time.monotonic() >= look_s:
                look_s, pause_s = time.monotonic() + pause_s, min(pause_s * 2, LONGEST_PAUSE_S)
                last = self._look(last)
            for make in makes:
                self._attempt(partial(self._write, make))
            if num_lost:
                self._put(Lost(num_requests=num_lost))
            self._attempt(TrafficFile.flush)
            if is_closed:
                return

    def _take(self, timeout_s: float) -> tuple[bool, list[MakeLine], int]:
        with self._gate:
            if not (self._waiting or self._is_closed):
                self._gate.wait(max(0.0, timeout_s))
            makes = [make for make, _ in self._waiting]
            self._waiting.clear()
            num_lost, self._num_lost, self._num_waiting_tokens = self._num_lost, 0, 0
            return self._is_closed, makes, num_lost

    def _write(self, make: MakeLine, file: TrafficFile) -> None:
        assert self._namer is not None
        file.write(make(self._namer))

    def _look(self, last: tuple[PoolFacts, ...]) -> tuple[PoolFacts, ...]:
        assert self._facts is not None
        try:
            pools = self._facts.look()
        except Exception:
            _log.exception("what is known of the workers is not recorded")
            return last
        if pools and pools != last:
            at_ns = Ns(time.monotonic_ns() - self._began_ns)
            self._put(Pools(at_ns=at_ns, pools=pools))
        return pools or last

    def _put(self, line: Line) -> None:
        self._attempt(lambda file: file.write(line))

    def _attempt(self, act: Callable[[TrafficFile], None]) -> None:
        if self._file is None:
            return
        try:
            act(self._file)
        except Exception as error:
            with self._gate:
                file, self._file = self._file, None
                self._waiting.clear()
            tell_end(_log, "the recording of traffic", file.path, error)
            with suppress(OSError):
                file.close()


class Keeper(Protocol):
    """Whoever keeps lines: a TrafficRecorder."""

    @property
    def began_ns(self) -> Ns: ...

    def add(self, make: MakeLine, num_tokens: int) -> None: ...


class _Life:
    __slots__ = ("number", "output", "spec")

    def __init__(self, spec: SeqSpec, number: int) -> None:
        self.spec = spec
        self.number = number
        self.output: list[int] = list(spec.output_tokens)


class EngineTraffic:
    """What an engine does, for a recorder. Belongs to the engine's thread: it is fed every event,
    and each record when it is final.
    """

    def __init__(self, recorder: Keeper) -> None:
        self._recorder = recorder
        self._living: dict[SeqId, _Life] = {}
        self._num_requests = 0

    @property
    def num_living(self) -> int:
        return len(self._living)

    def observe(self, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        if isinstance(event, Arrive) and event.seqs:
            for spec in event.seqs:
                self._living[spec.seq_id] = _Life(spec, self._num_requests)
            self._num_requests += 1
        for effect in effects:
            match effect:
                case Emit(seq_id, tokens):
                    if (life := self._living.get(seq_id)) is not None:
                        life.output += tokens
                case Reject(seq_id):
                    self._end(seq_id, None, effect.code)

    def ended(self, record: RequestRecord) -> None:
        self._end(record.seq_id, record)

    def _end(self, seq_id: SeqId, record: RequestRecord | None, code: str = "") -> None:
        life = self._living.pop(seq_id, None)
        if life is None:
            return
        make = partial(_line, life, record, code, self._recorder.began_ns)
        self._recorder.add(make, len(life.spec.prompt_tokens) + len(life.output))


def _line(
    life: _Life, record: RequestRecord | None, code: str, began_ns: Ns, namer: Namer
) -> Recorded:
    return recorded(
        life.spec,
        life.output,
        record,
        namer=namer,
        number=life.number,
        began_ns=began_ns,
        code=code,
    )
