"""One worker of a simulated cluster: an EngineCore, its executor, and its side of the network.

Decides which of its messages are lost, late or wrong; refuses to know what a front end makes of
them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Protocol

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    TIERS,
    Admitted,
    Arrive,
    CallAt,
    Computed,
    CopyDone,
    Emit,
    EndLease,
    EngineEffect,
    EngineEvent,
    Expect,
    Finish,
    KvChanged,
    Preempted,
    Reject,
    StartCopy,
    Timer,
)
from headrace.core.base.plan import StepPlan
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_MS, Ns, SeqId, WorkerId
from headrace.core.engine.build import build_worker
from headrace.core.engine.stats import EngineStats
from headrace.core.router.events import (
    WorkerKv,
    WorkerStats,
    WorkerUp,
)
from headrace.core.router.flight import Word
from headrace.core.router.front_events import FrontEvent, WorkerSaid
from headrace.core.telemetry import RequestRecord, Telemetry
from headrace.sim.cores import SharedCores
from headrace.sim.engine import SimEngine, TokenTimes, Told
from headrace.sim.loads import LoadReport
from headrace.sim.network import Network
from headrace.sim.pool import Habits, Pool
from headrace.sim.runtime import SimRuntime
from headrace.sim.steps import ListedSteps, Uneven
from headrace.sim.told_kv import ToldKv


class Front(Protocol):
    """What a worker needs of the world around it."""

    runtime: SimRuntime
    network: Network
    rng: Random

    @property
    def is_over(self) -> bool: ...

    @property
    def is_quiet(self) -> bool:
        """No request lives."""
        ...

    message_ns: Ns  # that a message takes

    def tell(self, event: FrontEvent, times: TokenTimes = ...) -> None:
        """With the times of tokens that were sampled one by one and are told together."""
        ...

    def later(self, call: Callable[[], None]) -> None:
        """After the time of a message."""
        ...

    def hear_load(self, report: LoadReport) -> None: ...

    def keep(self, records: Sequence[RequestRecord]) -> None:
        """What the worker knows of sequences whose ends are told next."""
        ...

    def find_place(self, kv_address: str) -> "SimWorker | None": ...

    def saw_plan(self, worker_id: WorkerId, plan: StepPlan) -> None: ...


class SimWorker:
    """The virtual driver of one EngineCore: what a worker process is under the real clock."""

    def __init__(
        self,
        front: Front,
        worker_id: WorkerId,
        name: str,
        pool: Pool,
        habits: Habits,
        cores: SharedCores | None = None,
    ) -> None:
        self.is_dead = False
        self.worker_id = worker_id
        self.name = name
        self.pool = pool
        self._habits = habits
        self._front = front
        core = build_worker(pool.config, pool.spec, pool.believed)
        self._kv = ToldKv(front, worker_id, pool, habits, core._kv, self._deliver)
        self._engine = SimEngine(
            core,
            ListedSteps(
                pool.cost,
                pool.spec.vocab_size,
                seed=habits.seed,
                written=habits.written,
                uneven=Uneven(pool.residuals, f"{habits.seed}/{name}") if pool.residuals else None,
            ),
            Telemetry(Slo(), pool.believed),
            front.runtime,
            self,
            glides=habits.glides and not pool.residuals,
            delay_ns=front.message_ns if self._kv.is_late else None,
            on_plan=partial(front.saw_plan, worker_id) if habits.shows_plans else None,
            cores=cores,
        )
        self._has_faults = habits.faults.happen
        self._period_ns = Ns(round(habits.stats_period_ms * NS_PER_MS))
        self._num_received = 0  # requests that came, or were announced
        self._announced: set[SeqId] = set()
        self._under_way: deque[Told] = deque()

    # ---- queries

    @property
    def kv_address(self) -> str:
        return str(self.worker_id)

    @property
    def busy_ns(self) -> int:
        """Time in steps."""
        return self._engine.busy_ns

    @property
    def is_idle(self) -> bool:
        """It has no sequence, and holds no KV for anybody."""
        return self._engine.core.is_idle

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def introduction(self) -> WorkerUp:
        pool, scheduler = self.pool, self.pool.config.scheduler
        return WorkerUp(
            worker_id=self.worker_id,
            name=self.name,
            spec=pool.spec,
            role=pool.role,
            step_tokens=scheduler.step_tokens,
            max_running_seqs=scheduler.max_running_seqs,
            cost=pool.believed,
            kv_address=self.kv_address,
            kv_block_bytes=pool.kv_block_bytes,
            publishes_kv=pool.publishes_kv,
        )

    def num_leading_blocks(self, names: Sequence[bytes]) -> int:
        """How many of these its device has, up to the first that it has not."""
        self._engine.catch_up()
        return self._kv.num_leading(names)

    # ---- what reaches it

    def receive(self, event: EngineEvent) -> None:
        if isinstance(event, Expect):
            self._num_received += 1
            self._announced.add(event.seq_id)
        elif isinstance(event, EndLease):
            self._announced.discard(event.seq_id)
        elif isinstance(event, Arrive):
            known = self._announced.intersection(spec.seq_id for spec in event.seqs)
            self._announced -= known
            self._num_received += not known
            if tiers := self._kv.tiers:
                now = self._front.runtime.now
                event = Arrive(tuple(tiers.offer(now, spec) for spec in event.seqs))
        self._handle(event)

    def close(self, end_ns: Ns) -> None:
        """Nothing more happens: what its front end should have heard of it by the end is told."""
        if (event := self._kv.take_late(end_ns)) is not None:
            self._front.tell(event)
        core = self._engine.core
        core.check()
        if not core.is_idle:
            raise InvariantError("a worker still holds something", stats=core.stats())

    def die(self) -> None:
        """What it made long enough ago has been heard: each token is sent when it is made."""
        self._engine.catch_up()
        self._kv.tell_late()
        until_ns = Ns(self._front.runtime.now - self._front.message_ns)
        runs = self._engine.runs(until_ns, self._under_way)
        if runs:
            said = WorkerSaid(self.worker_id, tuple(emit for emit, _ in runs))
            self._front.tell(said, {emit.seq_id: times_ns for emit, times_ns in runs})
        self._engine.stop()
        self.is_dead = True

    def _handle(self, event: EngineEvent) -> None:
        if not self.is_dead:
            self._engine.handle(event)

    # ---- what its engine does

    def hear(
        self,
        at_ns: Ns,
        effects: Sequence[EngineEffect],
        records: Sequence[RequestRecord],
        times: TokenTimes,
    ) -> None:
        if self._habits.is_checked:
            self._engine.core.check()
        words: list[Word] = []
        for effect in effects:
            match effect:
                case Emit() | Admitted() | Computed() | Preempted() | Finish() | Reject():
                    words.append(effect)
                case KvChanged(changes):
                    self._kv.publish(at_ns, changes)
                case CallAt(wake_ns, timer_id):
                    self._front.runtime.call_at(wake_ns, partial(self._ring, Timer(timer_id)))
                case StartCopy():
                    self._copy(effect)
        if words:
            heard_ns = Ns(at_ns + self._front.message_ns)
            self._under_way.append((words, times))
            self._front.runtime.call_at(heard_ns, partial(self._speak, tuple(words), records))

    def _ring(self, timer: Timer) -> None:
        # What is left when all requests have ended are deadlines of what is over.
        if not (self._front.is_over and self._engine.core.is_idle):
            self._handle(timer)

    # ---- KV of others, and of lower tiers

    def _load(self, copy: StartCopy) -> None:
        assert self._kv.tiers is not None
        runtime = self._front.runtime
        num_blocks, took_ns = self._kv.tiers.load(runtime.now, copy.names)
        num_bytes = num_blocks * self.pool.kv_block_bytes
        runtime.call_later(took_ns, partial(self._copied, copy, num_blocks, num_bytes))

    def _copy(self, copy: StartCopy) -> None:
        if copy.source == TIERS:
            self._load(copy)
            return
        source = self._front.find_place(copy.source)
        num_blocks = source.num_leading_blocks(copy.names) if source is not None else 0
        self._front.network.send(
            copy.source,
            self.kv_address,
            num_blocks * self.pool.kv_block_bytes,
            partial(self._copied, copy, num_blocks),
        )

    def _copied(self, copy: StartCopy, num_sent: int, num_bytes: float) -> None:
        """The whole blocks among what has come. Where these are not all, the engine must know that
        asking again would not help.
        """
        size = self.pool.kv_block_bytes
        num_blocks = min(num_sent, int(num_bytes // size)) if size else num_sent
        is_all = num_blocks == len(copy.names)
        self._handle(CopyDone(copy.copy_id, num_blocks, "" if is_all else "not all of it is there"))

    # ---- what it says

    def tell_load(self) -> None:
        """Now, and again after each period."""
        front = self._front
        if self.is_dead or front.is_over:
            return
        engine, now = self._engine, front.runtime.now
        report = LoadReport(self.worker_id, now, self._num_received, engine.count_loads)
        engine.reports.append(report)
        if self._habits.skips_ticks:
            front.runtime.tick_later(front.message_ns, partial(self._deliver_load, report))
        else:
            self._tell_stats(report.stats())
        front.runtime.tick_later(self._until_next_ns(), self.tell_load)

    def _tell_stats(self, stats: WorkerStats) -> None:
        draw, faults = self._front.rng.random() if self._has_faults else 1.0, self._habits.faults
        if draw < faults.stats_nan:
            load = msgspec.structs.replace(stats.stats, num_kv_tokens=float("nan"))
            stats = msgspec.structs.replace(stats, stats=load)
        if draw >= faults.stats_lost:
            self._front.runtime.tick_later(self._front.message_ns, partial(self._deliver, stats))

    def _deliver_load(self, report: LoadReport) -> None:
        if not self.is_dead and not self._front.is_over:
            self._front.hear_load(report)

    def _until_next_ns(self) -> Ns:
        """A period; where nothing happens for longer, as many as let it be heard once before
        something does: what is told between says what this one said.
        """
        front, period_ns = self._front, self._period_ns
        next_ns = front.runtime.next_ns
        if not (self._habits.skips_ticks and front.is_quiet) or next_ns is None:
            return period_ns
        quiet_ns = next_ns - front.message_ns - 1 - front.runtime.now
        return Ns(max(1, quiet_ns // period_ns) * period_ns)

    def send_snapshot(self) -> None:
        if not self.is_dead:
            self._kv.tell_late()
            self._front.later(partial(self._deliver, self._kv.snapshot()))

    def _deliver(self, event: FrontEvent) -> None:
        if not self.is_dead and not self._front.is_over:
            self._front.tell(event)

    def _speak(self, words: tuple[Word, ...], records: Sequence[RequestRecord]) -> None:
        if not self.is_dead:
            _, times = self._under_way.popleft()
            self._front.keep(records)
            self._front.tell(WorkerSaid(self.worker_id, words), times)

    def late_kv(self) -> WorkerKv | None:
        """What the front end should have heard of its blocks by now and has not."""
        self._engine.catch_up()
        return self._kv.take_late(self._front.runtime.now)
