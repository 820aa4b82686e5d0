"""Logs that `headrace sim run` and `sim whatif` take: recordings of traffic, and event logs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.base.events import Arrive, Emit
from headrace.core.base.request import Slo
from headrace.core.base.types import Ns
from headrace.core.base.worker import Role
from headrace.core.engine.trace import Frame
from headrace.core.telemetry import Telemetry
from headrace.core.workload.recording import (
    KEY_BYTES,
    Begin,
    Namer,
    PoolFacts,
    Pools,
    Recorded,
    Recording,
    fault_of_request,
    read_recording,
)
from headrace.live.event_log import EventLogReader, LogHeader, is_json
from headrace.live.step_fit import StepFit
from headrace.live.traffic import EngineTraffic, MakeLine
from headrace.models.files import open_regular

MAX_LINE_BYTES: Final = 64 << 20
MAX_TOKEN_ID: Final = (1 << 31) - 1


def path_of(log: str) -> Path:
    return Path(log).expanduser()


def is_recording(path: Path) -> bool:
    """By its first bytes: the other kind begins with a length. Raises ConfigError."""
    with open_regular(path) as file:
        return is_json(file.read(4))


def load_recording(log: str, like: str = "") -> Recording:
    """A recording with what was put aside of it, or what an event log says. Raises ConfigError.

    `like` is another one, whose workers stand for those that this one knows nothing of.
    """
    path = path_of(log)
    if is_recording(path):
        older = path.with_name(path.name + ".1")
        is_older_part = older.exists() and _id_of(older) == _id_of(path) != ""
        recording = read_recording(_lines([older, path] if is_older_part else [path]))
    else:
        with EventLogReader(path) as reader:
            recording = recording_of(reader.header, list(reader))
    if not recording.requests:
        raise ConfigError(f"{log} holds no request that has ended")
    if not like:
        return recording
    return msgspec.structs.replace(recording, pools=load_recording(like).pools)


def _id_of(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.readline(MAX_LINE_BYTES), type=Begin).recording_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError):
        return ""


def _lines(files: Sequence[Path]) -> Iterator[bytes]:
    for path in files:
        with open_regular(path) as file:
            while line := file.readline(MAX_LINE_BYTES):
                yield line


def recording_of(header: LogHeader, frames: Sequence[Frame]) -> Recording:
    """What a recorder would have written of an event log's traffic; its limits are the requests'
    own. Raises ConfigError for what cannot be.
    """
    spec, telemetry, steps = header.spec, Telemetry(Slo(), header.cost), StepFit(header.cost)
    keeper = _Keeper(spec.block_size, frames[0].now if frames else Ns(0))
    traffic = EngineTraffic(keeper)
    for frame in frames:
        _check_tokens(frame)
        steps.observe(frame.now, frame.event, frame.effects)
        traffic.observe(frame.event, frame.effects)
        for record in telemetry.observe(frame.now, frame.event, frame.effects):
            traffic.ended(record)
    for line in keeper.lines:
        if fault := fault_of_request(line):
            raise ConfigError(f"event log is damaged: request {line.request}: {fault}")
    pool = PoolFacts(
        role=Role.MIXED,
        num_workers=1,
        spec=spec,
        config=header.config,
        cost=steps.cost(),
        kv_block_bytes=0,
    )
    return Recording(
        begin=Begin(block_tokens=spec.block_size, is_alone=True),
        pools=(Pools(at_ns=Ns(0), pools=(pool,)),),
        requests=tuple(sorted(keeper.lines, key=lambda line: line.arrived_ns)),
        num_lost=traffic.num_living,
        is_truncated=False,
    )


def _check_tokens(frame: Frame) -> None:
    """Raises ConfigError for what is no token of any vocabulary."""
    given = [effect.tokens for effect in frame.effects if isinstance(effect, Emit)]
    if isinstance(frame.event, Arrive):
        given += [seq.prompt_tokens for seq in frame.event.seqs]
    for tokens in filter(None, given):
        if min(tokens) < 0 or max(tokens) > MAX_TOKEN_ID:
            raise ConfigError(f"event log is damaged: at {frame.now} ns is a token that cannot be")


class _Keeper:
    """A recorder that writes nothing."""

    def __init__(self, block_tokens: int, began_ns: Ns) -> None:
        self.began_ns = began_ns
        self.lines: list[Recorded] = []
        self._namer = Namer(bytes(KEY_BYTES), block_tokens)

    def add(self, make: MakeLine, num_tokens: int) -> None:
        self.lines.append(make(self._namer))


def notes_on(recording: Recording) -> list[str]:
    """What whoever reads figures of it should know."""
    notes = []
    if recording.is_truncated:
        notes.append("the recording's last line is cut, and left out")
    if recording.num_lost:
        notes.append(f"{recording.num_lost} requests are not in the recording")
    counts = {
        tuple(sorted((pool.role, pool.num_workers) for pool in one.pools))
        for one in recording.pools
    }
    if len(counts) > 1:
        notes.append("workers came and went; those that were there at the end are simulated")
    if recording.pools and not all(pool.cost.num_samples for pool in recording.pools[-1].pools):
        notes.append("steps take what a prior says: too few were recorded")
    return notes
