"""What can happen to a FrontCore, and what it can ask for."""

from typing import TypeAlias

import msgspec

from headrace.core.base.events import (
    Admitted,
    Arrive,
    CallAt,
    Cancel,
    Computed,
    Emit,
    EndLease,
    Expect,
    Finish,
    Preempted,
    Reject,
    Timer,
)
from headrace.core.base.request import FinishReason
from headrace.core.base.types import WorkerId
from headrace.core.router.events import (
    Resync,
    WorkerDown,
    WorkerDrain,
    WorkerKv,
    WorkerKvSnapshot,
    WorkerRole,
    WorkersStarting,
    WorkerStats,
    WorkerUp,
)
from headrace.core.router.flight import Word


class WorkerSaid(msgspec.Struct, frozen=True, tag=True):
    """What one event of a worker's engine has to say to readers."""

    worker_id: WorkerId
    words: tuple[Word, ...]


class EndAll(msgspec.Struct, frozen=True, tag=True):
    """The last word to everybody, whatever the workers still do."""

    reason: FinishReason
    error: str = ""


class Forward(msgspec.Struct, frozen=True, tag=True):
    """For a worker's engine."""

    worker_id: WorkerId
    event: Arrive | Cancel | EndLease | Expect | Computed


class WorkerStalled(msgspec.Struct, frozen=True, tag=True):
    """It has said nothing for longer than a hand-off may wait, while others have. It may be lost,
    or come back.
    """

    worker_id: WorkerId


class WorkerResumed(msgspec.Struct, frozen=True, tag=True):
    """One that had stalled has said something."""

    worker_id: WorkerId


FrontEvent: TypeAlias = (
    Arrive
    | Cancel
    | EndAll
    | WorkerUp
    | WorkerSaid
    | WorkerStats
    | WorkerKv
    | WorkerKvSnapshot
    | WorkerDrain
    | WorkerRole
    | WorkersStarting
    | WorkerStalled
    | WorkerResumed
    | WorkerDown
    | Timer
)
FrontEffect: TypeAlias = Admitted | Emit | Preempted | Finish | Reject | Forward | Resync | CallAt
