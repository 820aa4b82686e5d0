"""A FrontCore over real EngineCores, with everything between them in the hands of a seed: messages
are late, steps end in any order, workers die and come back.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from headrace.core.base.events import (
    Admitted,
    Arrive,
    BlockStored,
    CallAt,
    Cancel,
    CopyDone,
    Emit,
    EngineEffect,
    EngineEvent,
    Finish,
    KvChanged,
    Preempted,
    Reject,
    StartCopy,
    StartStep,
    StepDone,
    Timer,
)
from headrace.core.base.plan import StepPlan, TokenLogprob, WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import BlockId, Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.schema import (
    ClusterConfig,
    RouterConfig,
    SchedulerConfig,
    WorkerConfig,
)
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.build import build_worker
from headrace.core.router.core import RouterCore
from headrace.core.router.events import (
    Resync,
    WorkerDown,
    WorkerKv,
    WorkerKvSnapshot,
    WorkerUp,
)
from headrace.core.router.front import Forward, FrontCore, FrontEvent, WorkerSaid
from support.fake_device import VOCAB, FakeDevice, LinearCost


@dataclass
class Worker:
    """A worker and its line to the front end, which has an order and delays everything."""

    worker_id: WorkerId
    spec: WorkerSpec
    config: WorkerConfig
    role: Role
    to_worker: deque[EngineEvent | Resync] = field(default_factory=deque)
    to_front: deque[FrontEvent] = field(default_factory=deque)
    plans: deque[StepPlan] = field(default_factory=deque)
    copies: list[StartCopy] = field(default_factory=list)
    timers: list[tuple[Ns, int]] = field(default_factory=list)
    cached: dict[bytes, BlockId] = field(default_factory=dict)
    kv_no: int = 0

    def __post_init__(self) -> None:
        self.core = build_worker(self.config, self.spec, LinearCost())
        self.device = FakeDevice(self.spec)

    def handle(self, now: Ns, event: EngineEvent) -> None:
        if isinstance(event, Arrive):
            for spec in event.seqs:
                self.device.add(spec)
        words = []
        for effect in self.core.handle(now, event):
            match effect:
                case StartStep(plan):
                    self.plans.append(plan)
                case StartCopy():
                    self.copies.append(effect)
                case CallAt(at_ns, timer_id):
                    self.timers.append((at_ns, timer_id))
                case KvChanged(changes):
                    self.to_front.append(WorkerKv(self.worker_id, self.kv_no, changes))
                    self.kv_no += len(changes)
                    for change in changes:
                        if isinstance(change, BlockStored):
                            self.cached[change.name] = change.block_id
                        else:
                            del self.cached[change.name]
                case Admitted() | Emit() | Preempted() | Finish() | Reject():
                    words.append(effect)
                case _:
                    pass
        if words:
            self.to_front.append(WorkerSaid(self.worker_id, tuple(words)))


class ClusterWorld:
    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int = 24,
        max_migrations: int = 100,
        policy: str = "kv",
        roles: Sequence[Role] = (Role.MIXED,) * 3,
        handoff: str = "always",
        copy_failure_rate: float = 0.0,
        kv_link: str = "memory",
    ) -> None:
        self.rng = Random(seed)
        self.now = Ns(0)
        self.front = FrontCore(
            RouterCore(RouterConfig(policy=policy, seed=seed, kv_link=kv_link)),
            ClusterConfig(max_migrations=max_migrations, handoff=handoff),
        )
        self.workers: list[Worker] = []
        self.outputs: dict[SeqId, list[int]] = {}
        self.scores: dict[SeqId, list[TokenLogprob]] = {}
        self.ends: dict[SeqId, Finish | Reject] = {}
        self.living: dict[SeqId, SeqSpec] = {}
        self.is_cancelled: set[SeqId] = set()
        self.num_lost_workers = 0
        self._timers: list[tuple[Ns, int]] = []
        self._num_blocks = num_blocks
        self._next_worker_id = 0
        self._copy_failure_rate = copy_failure_rate
        self.num_copied_blocks = 0
        self.roles = roles
        for role in roles:
            self.add_worker(role)

    # ---- what happens

    @property
    def can_decode(self) -> bool:
        return any(worker.role is not Role.PREFILL for worker in self.workers)

    @property
    def missing_roles(self) -> list[Role]:
        left = list(self.roles)
        for worker in self.workers:
            left.remove(worker.role)
        return left

    def add_worker(self, role: Role) -> None:
        worker_id = WorkerId(self._next_worker_id)
        self._next_worker_id += 1
        spec = WorkerSpec(
            model_digest="00" * 32,
            kv_dtype="bf16",
            block_size=16,
            num_blocks=self._num_blocks,
            max_model_len=256,
            vocab_size=VOCAB,
        )
        config = WorkerConfig(
            scheduler=SchedulerConfig(step_tokens=64, admission="optimistic", overlap="on")
        )
        self.workers.append(Worker(worker_id, spec, config, role))
        self.handle(
            WorkerUp(
                worker_id=worker_id,
                name=f"w{worker_id}",
                spec=spec,
                role=role,
                kv_address=str(worker_id),
                kv_block_bytes=1000,
                step_tokens=64,
                cost=FittedCostModel.prior(),
            )
        )

    def lose_worker(self, worker: Worker) -> None:
        """What it has said and nobody has heard is lost with it."""
        self.workers.remove(worker)
        self.num_lost_workers += 1
        self.handle(WorkerDown(worker.worker_id, "killed"))

    def submit(self, seqs: tuple[SeqSpec, ...]) -> None:
        self.living.update((spec.seq_id, spec) for spec in seqs)
        self.handle(Arrive(seqs))

    def cancel(self, seq_id: SeqId) -> None:
        self.is_cancelled.add(seq_id)
        self.handle(Cancel(seq_id))

    def advance(self) -> bool:
        """One thing somewhere goes on; False where nothing is left to."""
        actions = []
        for worker in self.workers:
            if worker.to_worker:
                actions.append((self._deliver, worker))
            if worker.to_front:
                actions.append((self._hear, worker))
            if worker.plans:
                actions.append((self._end_step, worker))
            if worker.copies:
                actions.append((self._end_copy, worker))
            if any(at_ns <= self.now for at_ns, _ in worker.timers):
                actions.append((self._ring, worker))
        if actions:
            act, worker = self.rng.choice(actions)
            act(worker)
            return True
        if self._timers:
            at_ns, timer_id = min(self._timers)
            self._timers.remove((at_ns, timer_id))
            self.now = Ns(max(self.now, at_ns))
            self.handle(Timer(timer_id))
            return True
        return False

    def run(self) -> None:
        """To the end of everything."""
        for _ in range(200_000):
            if not self.living or not self.advance():
                break
        assert not self.living, f"{len(self.living)} sequences never end"
        while any(w.to_worker or w.to_front or w.plans or w.copies for w in self.workers):
            self.advance()
        self.front.check()
        for worker in self.workers:
            assert worker.core.is_idle

    def _tick(self) -> Ns:
        self.now = Ns(self.now + self.rng.randrange(1, 2_000_000))
        return self.now

    def _deliver(self, worker: Worker) -> None:
        message = worker.to_worker.popleft()
        if isinstance(message, Resync):
            names = tuple(worker.cached)
            worker.to_front.append(WorkerKvSnapshot(worker.worker_id, worker.kv_no, names))
        else:
            worker.handle(self._tick(), message)

    def _hear(self, worker: Worker) -> None:
        self.handle(worker.to_front.popleft())

    def _end_step(self, worker: Worker) -> None:
        result = worker.device.run(worker.plans.popleft())
        worker.handle(self._tick(), StepDone(result))

    def _end_copy(self, worker: Worker) -> None:
        """What the source has by now; or less, where something goes wrong on the way."""
        copy = worker.copies.pop(self.rng.randrange(len(worker.copies)))
        source = next((w for w in self.workers if str(w.worker_id) == copy.source), None)
        num_blocks = 0
        for name, block_id in zip(copy.names, copy.block_ids, strict=True):
            if source is None or name not in source.cached:
                break
            if self.rng.random() < self._copy_failure_rate:
                break
            content = source.device.block(source.cached[name])
            worker.device.write_block(block_id, content)
            num_blocks += 1
        self.num_copied_blocks += num_blocks
        error = "" if num_blocks == len(copy.names) else "broken off"
        worker.handle(self._tick(), CopyDone(copy.copy_id, num_blocks, error))

    def _ring(self, worker: Worker) -> None:
        timer = min(worker.timers)
        worker.timers.remove(timer)
        worker.handle(self._tick(), Timer(timer[1]))

    def handle(self, event: FrontEvent) -> None:
        for effect in self.front.handle(self._tick(), event):
            match effect:
                case Forward(worker_id, forwarded):
                    self._worker(worker_id).to_worker.append(forwarded)
                case Resync(worker_id):
                    self._worker(worker_id).to_worker.append(effect)
                case CallAt(at_ns, timer_id):
                    self._timers.append((at_ns, timer_id))
                case _:
                    self._read(effect)
        if self.rng.random() < 0.1:
            self.front.check()

    def _worker(self, worker_id: WorkerId) -> Worker:
        return next(worker for worker in self.workers if worker.worker_id == worker_id)

    def _read(self, word: EngineEffect) -> None:
        match word:
            case Emit(seq_id, tokens, _, prompt_logprobs):
                assert seq_id in self.living
                self.outputs.setdefault(seq_id, []).extend(tokens)
                self.scores.setdefault(seq_id, []).extend(prompt_logprobs)
            case Finish(seq_id):
                del self.living[seq_id]
                self.ends[seq_id] = word
                assert word.num_output_tokens == len(self.outputs.get(seq_id, ()))
            case Reject(seq_id):
                del self.living[seq_id]
                self.ends[seq_id] = word
            case _:
                pass
