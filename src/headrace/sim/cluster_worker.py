"""One worker of a simulated cluster: an EngineCore, its executor, and what it tells the router.

Decides which of its messages are lost, late or wrong; refuses to know what a router makes of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

import msgspec

from headrace.adapters.executors.sim import FakeSteps, SimExecutor
from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    Arrive,
    BlockStored,
    CallAt,
    Emit,
    EngineEvent,
    Finish,
    KvChanged,
    Reject,
    StartStep,
    Timer,
)
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.build import build_worker
from headrace.core.router.events import (
    RouterEvent,
    WorkerKv,
    WorkerKvSnapshot,
    WorkerLoad,
    WorkerStats,
)
from headrace.sim.runtime import SimRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFaults:
    """What goes wrong, as shares of the messages to the router."""

    kv_lost: float = 0.0
    kv_twice: float = 0.0
    kv_late: float = 0.0  # by up to `late_ms`, past others
    late_ms: float = 200.0
    stats_lost: float = 0.0
    stats_nan: float = 0.0


class Front(Protocol):
    """Where its messages go."""

    runtime: SimRuntime
    rng: Random

    @property
    def is_over(self) -> bool: ...

    def tell(self, event: RouterEvent) -> None: ...

    def later(self, call: Callable[[], None]) -> None:
        """After the time of a message."""
        ...

    def emitted(self, worker_id: WorkerId, emit: Emit) -> None: ...

    def ended(self, worker_id: WorkerId, end: Finish | Reject) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SimWorkerSetup:
    config: WorkerConfig
    spec: WorkerSpec
    cost: FittedCostModel  # how long steps take
    believed: FittedCostModel  # how long the worker believes they take, before it learns
    stats_period_ms: float
    faults: MessageFaults
    seed: int
    is_checked: bool


class SimWorker:
    """The virtual driver of one EngineCore, and its side of the network."""

    def __init__(self, front: Front, worker_id: WorkerId, setup: SimWorkerSetup) -> None:
        self.is_dead = False
        self._setup = setup
        self._front = front
        self._worker_id = worker_id
        self._core = build_worker(setup.config, setup.spec, setup.believed)
        # Tokens depend on the request alone, so that they are the same wherever it runs.
        steps = FakeSteps(setup.cost, setup.spec.vocab_size, seed=setup.seed)
        self._executor = SimExecutor(setup.spec, steps, front.runtime.call_later)
        self._blocks: dict[bytes, None] = {}  # what a snapshot holds, in the order of storing
        self._seq_no = 0
        self._num_received = 0

    def receive(self, spec: SeqSpec) -> None:
        if not self.is_dead:
            self._num_received += 1
            self._handle(Arrive((spec,)))

    def close(self) -> None:
        self._core.check()
        if not self._core.is_idle:
            raise InvariantError("a worker still holds something", stats=self._core.stats())

    def tell_load(self) -> None:
        """Now, and again after each period."""
        front = self._front
        if self.is_dead or front.is_over:
            return
        stats = self._core.stats()
        load = WorkerLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_queued_prefill_tokens=stats.num_prefill_tokens,
            num_kv_tokens=stats.num_kv_tokens,
            num_free_blocks=stats.num_free_blocks,
            num_cached_blocks=stats.num_cached_blocks,
            num_pinned_blocks=stats.num_pinned_blocks,
        )
        draw = front.rng.random()
        if draw < self._setup.faults.stats_nan:
            load = msgspec.structs.replace(load, num_kv_tokens=float("nan"))
        if draw >= self._setup.faults.stats_lost:
            self._say(WorkerStats(self._worker_id, load, self._num_received))
        period_ns = Ns(round(self._setup.stats_period_ms * NS_PER_MS))
        front.runtime.call_later(period_ns, self.tell_load)

    def send_snapshot(self) -> None:
        if not self.is_dead:
            self._say(WorkerKvSnapshot(self._worker_id, self._seq_no, tuple(self._blocks)))

    def _say(self, event: WorkerStats | WorkerKv | WorkerKvSnapshot) -> None:
        self._front.later(partial(self._deliver, event))

    def _deliver(self, event: WorkerStats | WorkerKv | WorkerKvSnapshot) -> None:
        if not self.is_dead and not self._front.is_over:
            self._front.tell(event)

    def _handle(self, event: EngineEvent) -> None:
        if self.is_dead:
            return
        effects = self._core.handle(self._front.runtime.now, event)
        if self._setup.is_checked:
            self._core.check()
        for effect in effects:
            match effect:
                case StartStep(plan):
                    self._executor.start(plan, self._handle)
                case CallAt(at_ns, timer_id):
                    call = partial(self._handle, Timer(timer_id))
                    self._front.runtime.call_at(at_ns, call)
                case KvChanged():
                    self._publish(effect)
                case Emit():
                    self._front.later(partial(self._front.emitted, self._worker_id, effect))
                case Finish() | Reject():
                    self._front.later(partial(self._front.ended, self._worker_id, effect))
                case _:
                    pass

    def _publish(self, changed: KvChanged) -> None:
        event = WorkerKv(self._worker_id, self._seq_no, changed.changes)
        self._seq_no += len(changed.changes)
        for change in changed.changes:
            if isinstance(change, BlockStored):
                self._blocks[change.name] = None
            else:
                del self._blocks[change.name]
        faults, rng = self._setup.faults, self._front.rng
        if rng.random() < faults.kv_lost:
            return
        if rng.random() < faults.kv_twice:
            self._say(event)
        if rng.random() < faults.kv_late:
            delay_ns = Ns(round(rng.random() * faults.late_ms * NS_PER_MS))
            self._front.runtime.call_later(delay_ns, partial(self._deliver, event))
        else:
            self._say(event)
