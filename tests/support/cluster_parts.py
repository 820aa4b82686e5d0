"""What a ClusterWorld is made of: front ends, workers, and the lines between them."""

from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from headrace.cluster.session import shifted
from headrace.cluster.wire import Submit
from headrace.core.base.events import (
    Admitted,
    Arrive,
    BlocksStored,
    CallAt,
    Cancel,
    Computed,
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
    StartStep,
)
from headrace.core.base.plan import StepPlan, TokenLogprob, WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import BlockId, Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.schema import WorkerConfig
from headrace.core.engine.build import build_worker
from headrace.core.engine.scope import Scope, Word
from headrace.core.router.core import RouterCore
from headrace.core.router.events import Resync, WorkerKv, WorkerKvSnapshot
from headrace.core.router.front import FrontCore
from headrace.core.router.front_events import FrontEvent, WorkerSaid
from support.fake_device import FakeDevice, LinearCost


@dataclass(eq=False)
class Front:
    """A front end and what its readers have heard. Each numbers its sequences and workers alone."""

    router: RouterCore
    core: FrontCore
    now: Ns
    outputs: dict[SeqId, list[int]] = field(default_factory=dict)
    scores: dict[SeqId, list[TokenLogprob]] = field(default_factory=dict)
    ends: dict[SeqId, Finish | Reject] = field(default_factory=dict)
    living: dict[SeqId, SeqSpec] = field(default_factory=dict)
    is_cancelled: set[SeqId] = field(default_factory=set)
    timers: list[tuple[Ns, int]] = field(default_factory=list)
    next_worker_id: int = 0
    ended_ns: dict[SeqId, Ns] = field(default_factory=dict)

    def read(self, word: EngineEffect) -> None:
        match word:
            case Emit(seq_id, tokens, _, prompt_logprobs):
                assert seq_id in self.living
                self.outputs.setdefault(seq_id, []).extend(tokens)
                self.scores.setdefault(seq_id, []).extend(prompt_logprobs)
            case Finish(seq_id):
                del self.living[seq_id]
                self.ends[seq_id] = word
                self.ended_ns[seq_id] = self.now
                assert word.num_output_tokens == len(self.outputs.get(seq_id, ()))
            case Reject(seq_id):
                del self.living[seq_id]
                self.ends[seq_id] = word
                self.ended_ns[seq_id] = self.now
            case _:
                pass


class Gone:
    """Stands in a line where the front end at its other end has died."""


@dataclass(eq=False)
class Line:
    """Between a worker and a front end: it has an order, and delays everything."""

    front: Front
    worker_id: WorkerId  # as this front end calls it
    scope: Scope = field(default_factory=Scope)
    to_worker: deque[Submit | EngineEvent | Resync | Gone] = field(default_factory=deque)
    to_front: deque[FrontEvent] = field(default_factory=deque)


@dataclass(eq=False)
class Worker:
    """A worker and its lines to front ends."""

    name: str
    spec: WorkerSpec
    config: WorkerConfig
    role: Role
    clock_ns: int = 0  # what its clock shows when the world's shows 0
    lines: list[Line] = field(default_factory=list)
    next_seq_id: int = 0
    plans: deque[StepPlan] = field(default_factory=deque)
    copies: list[StartCopy] = field(default_factory=list)
    timers: list[tuple[Ns, int]] = field(default_factory=list)
    cached: dict[bytes, BlockId] = field(default_factory=dict)
    kv_no: int = 0

    def __post_init__(self) -> None:
        self.core = build_worker(self.config, self.spec, LinearCost())
        self.device = FakeDevice(self.spec)

    def handle(self, now: Ns, event: EngineEvent) -> None:
        """At a time of the world, which its core knows by its own clock only."""
        if isinstance(event, Arrive):
            for spec in event.seqs:
                self.device.add(spec)
        words: list[Word] = []
        for effect in self.core.handle(self._here(now), event):
            match effect:
                case StartStep(plan):
                    self.plans.append(plan)
                case StartCopy():
                    self.copies.append(effect)
                case CallAt(at_ns, timer_id):
                    self.timers.append((Ns(at_ns - self.clock_ns), timer_id))
                case KvChanged(changes):
                    for line in self.lines:
                        line.to_front.append(WorkerKv(line.worker_id, self.kv_no, changes))
                    self.kv_no += len(changes)
                    for change in changes:
                        if isinstance(change, BlocksStored):
                            self.cached |= zip(change.names, change.block_ids, strict=True)
                        else:
                            for name in change.names:
                                del self.cached[name]
                case Admitted() | Computed() | Emit() | Preempted() | Finish() | Reject():
                    words.append(effect)
                case _:
                    pass
        for line in self.lines:
            said = [word for word in map(line.scope.outward, words) if word is not None]
            if said:
                line.to_front.append(WorkerSaid(line.worker_id, tuple(said)))

    def receive(self, now: Ns, line: Line) -> None:
        match message := line.to_worker.popleft():
            case Gone():
                self.lines.remove(line)
                for inner in line.scope.living():
                    self.handle(now, Cancel(inner))
                for inner in line.scope.held():
                    self.handle(now, EndLease(inner))
            case Resync():
                self.tell_all_cached(line)
            case Submit(seqs, sent_ns):
                ids = range(self.next_seq_id, self.next_seq_id + len(seqs))
                self.next_seq_id = ids.stop
                shift_ns = self._here(now) - sent_ns
                inward = line.scope.enter([shifted(spec, shift_ns) for spec in seqs], ids)
                self.handle(now, Arrive(inward))
            case Cancel(seq_id, reason):
                living = line.scope.inner(seq_id)
                if living is not None:
                    self.handle(now, Cancel(living, reason))
            case Expect(seq_id=seq_id):
                inner = line.scope.expect(seq_id, self.next_seq_id)
                self.next_seq_id += 1
                self.handle(now, replace(message, seq_id=inner))
            case Computed(seq_id):
                expected = line.scope.expected(seq_id)
                if expected is not None:
                    self.handle(now, replace(message, seq_id=expected))
            case EndLease(seq_id):
                lent = line.scope.end_lease(seq_id)
                if lent is not None:
                    self.handle(now, EndLease(lent))
            case _:
                raise AssertionError(message)

    def _here(self, now: Ns) -> Ns:
        return Ns(now + self.clock_ns)

    def tell_all_cached(self, line: Line) -> None:
        line.to_front.append(WorkerKvSnapshot(line.worker_id, self.kv_no, tuple(self.cached)))
