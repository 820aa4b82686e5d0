"""The event log: every event of an engine with its effects, enough to run the engine's decisions
again.

A file is frames, each a length (unsigned 32-bit, little endian) and that many bytes of MessagePack.
The first frame is the LogHeader, the others are `core.engine.trace` frames. A crash may cut the
last frame; that is reported, not fatal.
"""

import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from headrace import __version__
from headrace.core.base.errors import ConfigError
from headrace.core.base.events import EngineEffect, EngineEvent
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.types import Ns
from headrace.core.config.schema import WorkerConfig
from headrace.core.config.units import format_bytes, size_text
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.limits import fault_of_worker
from headrace.core.engine.trace import Frame, decode_frame, encode_frame
from headrace.live.lost_recording import tell_end
from headrace.models.files import open_regular

_log = logging.getLogger(__name__)

FORMAT: Final = "hrlog1"
MAX_FRAME_BYTES: Final = 256 << 20
_LENGTH = struct.Struct("<I")


class LogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what an EngineCore does with its events."""

    format: str = FORMAT
    headrace_version: str = __version__
    config: WorkerConfig
    spec: WorkerSpec
    cost: FittedCostModel


class EventLogWriter:
    """Appends frames to a new file. Not thread-safe. Raises OSError as files do."""

    def __init__(self, path: Path, header: LogHeader) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # A pipe that nobody reads from would be waited for.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
        os.set_blocking(handle, True)
        self._file = os.fdopen(handle, "wb")
        self._write(msgspec.msgpack.encode(header))

    def write(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        self._write(encode_frame(now, event, effects))

    def _write(self, data: bytes) -> None:
        if len(data) > MAX_FRAME_BYTES:
            raise OSError(
                f"frame of {format_bytes(len(data))} is larger than {size_text(MAX_FRAME_BYTES)}"
            )
        self._file.write(_LENGTH.pack(len(data)) + data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Recorder:
    """Records until it cannot: a full disk ends the recording, never the engine. Not thread-safe.

    Without a path it records nothing. Raises OSError where the file cannot be begun.
    """

    def __init__(self, path: Path | None, header: LogHeader) -> None:
        self._writer = None if path is None else EventLogWriter(path, header)

    def record(self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        self._attempt(lambda writer: writer.write(now, event, effects))

    def flush(self) -> None:
        self._attempt(EventLogWriter.flush)

    def close(self) -> None:
        self._attempt(EventLogWriter.close)

    def _attempt(self, act: Callable[[EventLogWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            act(self._writer)
        except Exception as error:
            writer, self._writer = self._writer, None
            tell_end(_log, "the event log", writer.path, error)
            with suppress(OSError):
                writer.close()


def is_json(prefix: bytes) -> bool:
    """Whether a file that begins with these four bytes holds JSON. An event log may begin with a
    brace, too: its first frame's length, which is never what four letters would be.
    """
    if len(prefix) < _LENGTH.size:
        return prefix.startswith(b"{")
    return prefix.startswith(b"{") and _LENGTH.unpack(prefix)[0] > MAX_FRAME_BYTES


class EventLogReader:
    """Iterates over the frames of a file; `is_truncated` tells, after that, whether the last one
    was cut.
    """

    def __init__(self, path: Path) -> None:
        self.is_truncated = False
        self._file = open_regular(path)
        try:
            self.header = self._read_header(path)
        except ConfigError:
            self.close()
            raise

    def _read_header(self, path: Path) -> LogHeader:
        prefix = self._file.read(_LENGTH.size)
        self._file.seek(0)
        is_whole = len(prefix) == _LENGTH.size
        if is_json(prefix) or (is_whole and _LENGTH.unpack(prefix)[0] > MAX_FRAME_BYTES):
            but_text = ", but text" if is_json(prefix) else ""
            raise ConfigError(
                f"not an event log{but_text}: {path}",
                hint="`serve --event-log` writes event logs; `sim run` and `sim whatif` take"
                " recordings of traffic (`serve --record`), too",
            )
        try:
            header = msgspec.msgpack.decode(self._read() or b"", type=LogHeader)
        except msgspec.DecodeError:
            header = None
        if header is None or header.format != FORMAT:
            raise ConfigError(f"not an event log of format {FORMAT}", path=str(path))
        if fault := fault_of_worker(header.spec, header.config, header.cost):
            raise ConfigError(f"event log is damaged: {fault}", path=str(path))
        return header

    def __iter__(self) -> Iterator[Frame]:
        while (data := self._read()) is not None:
            try:
                yield decode_frame(data)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"event log is damaged: {error}", offset=self._file.tell() - len(data)
                ) from error

    def _read(self) -> bytes | None:
        prefix = self._file.read(_LENGTH.size)
        if not prefix:
            return None
        if len(prefix) == _LENGTH.size:
            (length,) = _LENGTH.unpack(prefix)
            if length > MAX_FRAME_BYTES:
                raise ConfigError(
                    "event log is damaged: a frame is too large",
                    num_bytes=length,
                    limit_bytes=MAX_FRAME_BYTES,
                )
            data = self._file.read(length)
            if len(data) == length:
                return data
        self.is_truncated = True
        return None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "EventLogReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
