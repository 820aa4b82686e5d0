"""Replay: a recorded engine's events, fed to a new core, must have the recorded effects."""

from itertools import zip_longest
from pathlib import Path

import msgspec

from headrace.core.base.events import EngineEffect, EngineEvent
from headrace.core.base.types import Ns
from headrace.core.engine.build import build_worker
from headrace.live.event_log import EventLogReader

_encode = msgspec.msgpack.Encoder().encode


class Difference(msgspec.Struct, frozen=True):
    """The first effect that is not as recorded; None stands for an effect that is missing on that
    side.
    """

    event_index: int
    now: Ns
    event: EngineEvent
    effect_index: int
    recorded: EngineEffect | None
    replayed: EngineEffect | None

    def __str__(self) -> str:
        return (
            f"event {self.event_index} ({type(self.event).__name__} at {self.now} ns),"
            f" effect {self.effect_index}:"
            f"\n  recorded: {self.recorded}\n  replayed: {self.replayed}"
        )


class ReplayReport(msgspec.Struct, frozen=True):
    num_events: int  # compared, the one that differs included
    difference: Difference | None
    is_truncated: bool  # the log's last frame was cut, as by a crash

    @property
    def is_equal(self) -> bool:
        return self.difference is None


def replay(path: Path) -> ReplayReport:
    """Feed a log's events to a core built from its header, up to the first difference.

    Raises ConfigError for a file that is not a log, and whatever the recorded core raised, where it
    did.
    """
    num_events = 0
    with EventLogReader(path) as log:
        header = log.header
        core = build_worker(header.config, header.spec, header.cost)
        for frame in log:
            effects = core.handle(frame.now, frame.event)
            num_events += 1
            for index, (recorded, replayed) in enumerate(zip_longest(frame.effects, effects)):
                # Bytes, since they also tell 1 from 1.0 and find a NaN equal to itself.
                if _encode(recorded) != _encode(replayed):
                    difference = Difference(
                        num_events - 1, frame.now, frame.event, index, recorded, replayed
                    )
                    return ReplayReport(num_events, difference, log.is_truncated)
        return ReplayReport(num_events, None, log.is_truncated)
