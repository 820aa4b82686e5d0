"""Engine: what serves sequences, wherever they run. Everything that answers people stands on it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.core.base.events import EngineEffect, EngineEvent
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.types import Ns, SeqId
from headrace.core.base.worker import Role
from headrace.core.engine.stats import EngineStats
from headrace.core.router.decision import Decision
from headrace.core.telemetry import RequestRecord
from headrace.live.listeners import Observer, Sink
from headrace.live.messages import CallThere


class Records(Protocol):
    """A fold that makes a record of each sequence that ends."""

    def observe(
        self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]
    ) -> list[RequestRecord]: ...


class WorkerPhase(StrEnum):
    DOWN = "down"  # it has no process
    STARTING = "starting"
    CANARY = "canary"  # it has loaded, and has to answer a canary first
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A process behind an engine, as last heard."""

    name: str
    role: str
    phase: WorkerPhase
    stage: str  # what it is about before it is ready, in words; empty = it is, or has no process
    has_come: bool  # its process is there; it may be loading
    is_ready: bool
    pid: int | None  # None while it has no process
    num_starts: int
    stats: EngineStats | None  # None while it is not ready
    fault: str  # why its last life was lost; empty = none was
    cause: str  # the same in one word
    losses: dict[str, int]  # how often, by such words
    restart_in_s: float | None  # None = it has a process


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """All workers of one role, and what an autoscaler thinks of them."""

    role: str
    num_wanted: int
    num_ready: int
    num_starting: int
    num_draining: int
    loop: str  # that led to the last decision; empty = there was none
    constraint: str  # that binds after it, by the forecast; empty = there is none
    is_limited: bool  # more were wanted than there may be


class Engine(Protocol):
    """Thread-safe. `LiveEngine` is one in this process, `ClusterEngine` is many in others."""

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped for good; None while it works."""
        ...

    def next_seq_ids(self, n: int) -> range:
        """`n` sequence ids that nobody else gets."""
        ...

    def submit(self, specs: Sequence[SeqSpec], sink: Sink) -> None:
        """Let the sequences of a request arrive together. `sink` hears Admitted, Emit, Preempted,
        Finish and Reject of each of them, on the engine's thread, so it must be quick.
        """
        ...

    def cancel(self, seq_id: SeqId, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence as soon as possible. Idempotent; unknown ids are fine."""
        ...

    def stats(self) -> EngineStats: ...

    def workers(self) -> Sequence[WorkerState]:
        """The processes behind it; none where it is in this one."""
        ...

    def absence(self) -> str:
        """Why nobody would compute a sequence that came now, though it may come and wait, in words
        with what helps; empty = somebody would, or wakes up for it.
        """
        ...

    def set_role(self, worker: str, role: Role) -> Future[None]:
        """Let this process be for something else from now on, without an end of anything. The
        future hears RequestError where that cannot be, OverloadError where the worker was lost over
        it, or may hear nothing where the worker does not answer.
        """
        ...

    def pools(self) -> Sequence[PoolStatus]:
        """What an autoscaler looks after; none where there is no autoscaler."""
        ...

    def decision(self, request_id: str) -> Decision | None:
        """Why a request of late went to its worker; None where nobody chose, or remembers."""
        ...

    def telemetry(self, default_slo: Slo) -> Records:
        """A fold for one observer; `default_slo` limits requests that state no limits."""
        ...

    def observe(self, callback: Observer) -> None:
        """Call `callback(now, event, effects)` on the engine's thread after each event, when all
        sinks have heard.
        """
        ...

    def after_words(self, callback: Callable[[], None]) -> None:
        """Call it after each event, when all sinks have heard, where they have heard."""
        ...

    def speak_in(self, call: CallThere) -> None:
        """What steps have to say may be said where `call` calls: whoever hears of it is there."""
        ...

    def call_soon(self, callback: Callable[[Ns], None]) -> None:
        """Call `callback(now)` on the engine's thread, after what the caller has asked before."""
        ...

    def check(self) -> None:
        """Raise InvariantError unless every law holds."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new sequences, wait until those that live have ended; False = some still live."""
        ...

    def close(self) -> None:
        """Cancel what lives and free everything. Idempotent."""
        ...
