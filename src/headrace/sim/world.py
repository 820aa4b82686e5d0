"""A world: workers, what happens to them from outside, and faults, run to the end under a virtual
clock.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from headrace.adapters.executors.sim import FakeSteps, SimExecutor, StepSource
from headrace.core.base.errors import DeviceError, InvariantError
from headrace.core.base.events import (
    Arrive,
    CallAt,
    Cancel,
    Emit,
    EngineEffect,
    EngineEvent,
    Finish,
    KvChanged,
    Reject,
    StartCopy,
    StartStep,
    StepFailed,
    Timer,
)
from headrace.core.base.plan import StepPlan, WorkerSpec
from headrace.core.base.request import Slo
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.model import CostModel
from headrace.core.engine.build import build_worker
from headrace.core.engine.stats import EngineStats
from headrace.core.engine.trace import encode_frame
from headrace.core.telemetry import RequestRecord, Telemetry
from headrace.sim.runtime import SimRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """One worker and everything that reaches it from outside."""

    config: WorkerConfig
    spec: WorkerSpec
    cost: CostModel
    inputs: Sequence[tuple[Ns, Arrive | Cancel | Timer]]
    steps: StepSource | None = None  # None = made up, from the world's seed and failure rate
    has_timers: bool = True  # False = CallAt is not carried out, `inputs` hold the timers


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    workers: tuple[WorkerSetup, ...]
    seed: int = 0
    failure_rate: float = 0.0  # share of steps that fail
    default_slo: Slo = field(default_factory=Slo)  # limits of requests that state none
    is_checked: bool = True  # the core checks its laws after every event, at a cost
    max_calls: int = 10_000_000  # taken for a world that never ends


@dataclass(slots=True)
class WorkerReport:
    """What became of one worker's sequences."""

    tokens_by_seq_id: dict[SeqId, list[int]] = field(default_factory=dict)
    ends_by_seq_id: dict[SeqId, Finish | Reject] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)  # in the order of their ends
    stats: EngineStats | None = None  # at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class SimReport:
    """`trace_hash` is the hex SHA-256 over every worker's every (now, event, effects), in the order
    they happened.
    """

    trace_hash: str
    num_events: int
    end_ns: Ns
    workers: tuple[WorkerReport, ...]


Observer = Callable[[int, Ns, EngineEvent, Sequence[EngineEffect]], None]
"""Sees (worker index, now, event, effects) of every event, in the order they happen."""


def simulate(world: World, observe: Observer | None = None) -> SimReport:
    """Run a world until nothing is left to happen.

    Raises InvariantError when a law of the core breaks or a sequence does not end exactly once.
    """
    runtime, trace = SimRuntime(), _Trace(observe)
    workers = [
        _Worker(index, setup, world, runtime, trace) for index, setup in enumerate(world.workers)
    ]
    runtime.run(max_calls=world.max_calls)
    for worker in workers:
        worker.close()
    return SimReport(
        trace_hash=trace.digest.hexdigest(),
        num_events=trace.num_events,
        end_ns=runtime.now,
        workers=tuple(worker.report for worker in workers),
    )


class _Trace:
    def __init__(self, observe: Observer | None) -> None:
        self.digest = hashlib.sha256()
        self.num_events = 0
        self._observe = observe

    def add(
        self, worker: int, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]
    ) -> None:
        self.digest.update(worker.to_bytes(4, "little"))
        self.digest.update(encode_frame(now, event, effects))
        self.num_events += 1
        if self._observe is not None:
            self._observe(worker, now, event, effects)


class _Worker:
    """The virtual driver of one EngineCore: what LiveEngine is under the real clock."""

    def __init__(
        self, index: int, setup: WorkerSetup, world: World, runtime: SimRuntime, trace: _Trace
    ) -> None:
        self.report = WorkerReport()
        self._index = index
        self._core = build_worker(setup.config, setup.spec, setup.cost)
        self._runtime = runtime
        self._trace = trace
        self._telemetry = Telemetry(world.default_slo, setup.cost)
        self._is_checked = world.is_checked
        self._has_timers = setup.has_timers
        self._alive: set[SeqId] = set()
        steps = setup.steps or FakeSteps(
            setup.cost,
            setup.spec.vocab_size,
            seed=world.seed + index,
            failure_rate=world.failure_rate,
        )
        self._executor = SimExecutor(setup.spec, steps, runtime.call_later)
        for at_ns, event in setup.inputs:
            runtime.call_at(at_ns, partial(self._handle, event))

    def close(self) -> None:
        """The end of the world: nothing is alive and nothing is held."""
        self._core.check()
        stats = self.report.stats = self._core.stats()
        if self._alive or stats.num_running or stats.num_waiting or stats.num_pinned_blocks:
            raise InvariantError("sequences never ended", alive=len(self._alive), stats=stats)

    def _handle(self, event: EngineEvent) -> None:
        if isinstance(event, Arrive):
            for spec in event.seqs:
                self._alive.add(spec.seq_id)
                if spec.output_tokens:
                    self.report.tokens_by_seq_id[spec.seq_id] = list(spec.output_tokens)
        now = self._runtime.now
        effects = self._core.handle(now, event)
        self._trace.add(self._index, now, event, effects)
        self.report.records += self._telemetry.observe(now, event, effects)
        if self._is_checked:
            self._core.check()
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: EngineEffect) -> None:
        match effect:
            case StartStep(plan):
                self._start(plan)
            case CallAt(at_ns, timer_id):
                if self._has_timers:
                    self._runtime.call_at(at_ns, partial(self._handle, Timer(timer_id)))
            case Emit(seq_id, tokens):
                if seq_id not in self._alive:
                    raise InvariantError("tokens for a sequence that has ended", seq_id=seq_id)
                self.report.tokens_by_seq_id.setdefault(seq_id, []).extend(tokens)
            case Finish(seq_id) | Reject(seq_id):
                self._end(seq_id, effect)
            case StartCopy(copy_id=copy_id):
                raise InvariantError("no mover to carry out a copy", copy_id=copy_id)
            case KvChanged() | _:
                pass

    def _start(self, plan: StepPlan) -> None:
        try:
            self._executor.start(plan, self._handle)
        except DeviceError as error:
            self._runtime.call_later(
                Ns(0), partial(self._handle, StepFailed(plan.step_id, str(error)))
            )

    def _end(self, seq_id: SeqId, end: Finish | Reject) -> None:
        if seq_id not in self._alive:
            raise InvariantError("sequence ended twice", seq_id=seq_id)
        self._alive.remove(seq_id)
        if isinstance(end, Finish):
            num_emitted = len(self.report.tokens_by_seq_id.get(seq_id, ()))
            if num_emitted != end.num_output_tokens:
                raise InvariantError(
                    "tokens lost", seq_id=seq_id, emitted=num_emitted, counted=end.num_output_tokens
                )
        self.report.ends_by_seq_id[seq_id] = end
