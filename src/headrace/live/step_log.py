"""What event logs tell of times: steps, copies of KV, and the way of requests to the engine.

Decides between which moments a thing took place; refuses to know what the times are good for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headrace.core.base.errors import ConfigError
from headrace.core.base.events import (
    Arrive,
    CopyDone,
    Emit,
    Finish,
    StartCopy,
    StartStep,
    StepDone,
    StepFailed,
)
from headrace.core.base.types import Ns, StepId
from headrace.core.cost.contention import TimedStep
from headrace.core.cost.model import StepShape
from headrace.core.engine.trace import Frame
from headrace.live.event_log import EventLogReader, LogHeader


@dataclass(slots=True)
class SeenRequest:
    """One sequence on one worker. Moments are those of the machine's monotonic clock."""

    num_prompt_tokens: int
    come_ns: Ns  # at the server
    arrived_ns: Ns  # in the engine
    first_token_ns: Ns | None = None
    last_token_ns: Ns | None = None


class CopyTime(NamedTuple):
    """A copy of KV that came whole, as whoever asked for it saw it."""

    num_blocks: int
    elapsed_ns: Ns
    begin_ns: Ns


def whole_way(seqs: Sequence[SeenRequest]) -> SeenRequest:
    """Of a request that went from worker to worker: in at the first, and out from the last."""
    first = min(seqs, key=lambda seq: seq.arrived_ns)
    tokens_ns = [
        at_ns
        for seq in seqs
        for at_ns in (seq.first_token_ns, seq.last_token_ns)
        if at_ns is not None
    ]
    return SeenRequest(
        first.num_prompt_tokens,
        min(seq.come_ns for seq in seqs),
        first.arrived_ns,
        min(tokens_ns, default=None),
        max(tokens_ns, default=None),
    )


@dataclass(slots=True)
class LoggedTimes:
    """What the logs of some workers of one machine tell."""

    header: LogHeader
    steps: list[TimedStep] = field(default_factory=list)
    copies: list[CopyTime] = field(default_factory=list)
    # By request id; several where it went through several workers, or had choices.
    requests: dict[str, list[SeenRequest]] = field(default_factory=dict)

    def between(self, begin_ns: Ns, end_ns: Ns) -> "LoggedTimes":
        """What began from one moment until the other."""
        return LoggedTimes(
            self.header,
            [step for step in self.steps if begin_ns <= step.begin_ns < end_ns],
            [copy for copy in self.copies if begin_ns <= copy.begin_ns < end_ns],
            {
                request_id: seqs
                for request_id, seqs in self.requests.items()
                if begin_ns <= min(seq.come_ns for seq in seqs) < end_ns
            },
        )

    @staticmethod
    def joined(parts: "Sequence[LoggedTimes]") -> "LoggedTimes":
        """Of workers that were alike, at one time or several. There must be one at least."""
        found = LoggedTimes(parts[0].header)
        for one in parts:
            found.steps += one.steps
            found.copies += one.copies
            for request_id, seqs in one.requests.items():
                found.requests.setdefault(request_id, []).extend(seqs)
        return found


def read_logs(paths: Sequence[Path]) -> LoggedTimes:
    """Raises ConfigError for files that are no event logs, or not of workers that are alike."""
    found: LoggedTimes | None = None
    for worker, path in enumerate(paths):
        with EventLogReader(path) as reader:
            if found is None:
                found = LoggedTimes(reader.header)
            elif reader.header.spec.model_digest != found.header.spec.model_digest:
                raise ConfigError("the logs are of different models", path=str(path))
            _Reading(worker, found).read(reader)
    if found is None:
        raise ConfigError("there is no log to read")
    return found


class _Reading:
    """Of one worker's log."""

    def __init__(self, worker: int, found: LoggedTimes) -> None:
        self._worker = worker
        self._found = found
        self._started: dict[StepId, tuple[StepShape, Ns]] = {}
        self._ended_ns = Ns(0)  # the last step
        self._copies: dict[int, tuple[int, Ns]] = {}
        self._seqs: dict[int, SeenRequest] = {}

    def read(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self._event(frame)
            for effect in frame.effects:
                match effect:
                    case StartStep(plan):
                        self._started[plan.step_id] = StepShape.of(plan), frame.now
                    case StartCopy():
                        self._copies[effect.copy_id] = len(effect.names), frame.now
                    case Emit(seq_id) if (seq := self._seqs.get(seq_id)) is not None:
                        seq.first_token_ns = seq.first_token_ns or frame.now
                        seq.last_token_ns = frame.now
                    case Finish(seq_id):
                        self._seqs.pop(seq_id, None)

    def _event(self, frame: Frame) -> None:
        match frame.event:
            case Arrive(seqs):
                for spec in seqs:
                    seq = SeenRequest(len(spec.prompt_tokens), spec.arrived_ns, frame.now)
                    self._seqs[spec.seq_id] = seq
                    self._found.requests.setdefault(spec.request_id, []).append(seq)
            case StepDone(result):
                self._end(frame.now, result.step_id, result.elapsed_ns)
            case StepFailed(step_id):
                self._end(frame.now, step_id, None)
            case CopyDone(copy_id) as done:
                num_blocks, begin_ns = self._copies.pop(copy_id, (0, frame.now))
                if num_blocks and done.num_blocks == num_blocks:
                    elapsed_ns = Ns(frame.now - begin_ns)
                    self._found.copies.append(CopyTime(num_blocks, elapsed_ns, begin_ns))

    def _end(self, now: Ns, step_id: StepId, device_ns: Ns | None) -> None:
        shape, started_ns = self._started.pop(step_id, (None, now))
        begin_ns, self._ended_ns = max(started_ns, self._ended_ns), now
        if shape is not None and device_ns is not None:
            self._found.steps.append(
                TimedStep(
                    worker=self._worker,
                    begin_ns=begin_ns,
                    end_ns=now,
                    device_ns=device_ns,
                    shape=shape,
                )
            )
