"""FrontCores over real EngineCores, with everything between them in the hands of a seed: messages
are late, steps end in any order, workers and front ends die and come back.
"""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from headrace.adapters.movers.lane import STALL_S
from headrace.cluster.wire import Submit
from headrace.core.base.events import (
    Arrive,
    CallAt,
    Cancel,
    CopyDone,
    Finish,
    Reject,
    StartCopy,
    StepDone,
    Timer,
)
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig, SchedulerConfig, WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.router.core import RouterCore
from headrace.core.router.events import Resync, WorkerDown, WorkerRole, WorkersStarting, WorkerUp
from headrace.core.router.front import FrontCore
from headrace.core.router.front_events import Forward, FrontEvent
from headrace.core.router.replicas import NUM_PARTS
from support.cluster_parts import Front, Gone, Line, Worker
from support.fake_device import VOCAB, expected_output

STALL_NS = round(STALL_S * NS_PER_S)
ONE_MORE = SeqId(1 << 40)


class ClusterWorld:
    def __init__(
        self,
        seed: int,
        *,
        num_blocks: Sequence[int] = (24,),
        max_migrations: int = 100,
        policy: str = "kv",
        roles: Sequence[Role] = (Role.MIXED,) * 3,
        handoff: str = "always",
        copy_failure_rate: float = 0.0,
        kv_link: str = "memory",
        num_fronts: int = 1,
        most_clock_ns: int = 0,
        step_tokens: int = 64,
    ) -> None:
        """Workers take turns in `num_blocks`. Their clocks are up to `most_clock_ns` ahead."""
        self.rng = Random(seed)
        self.now = Ns(0)
        self._most_clock_ns = most_clock_ns
        self._step_tokens = step_tokens
        self._router = RouterConfig(policy=policy, seed=seed, kv_link=kv_link)
        self._cluster = ClusterConfig(max_migrations=max_migrations, handoff=handoff)
        self.workers: list[Worker] = []
        self.fronts: list[Front] = []
        for _ in range(num_fronts):
            self.add_front()
        self.num_lost_workers = 0
        self._num_blocks = num_blocks
        self._num_workers = 0  # names of workers
        self._free_names: list[str] = []
        self._copy_failure_rate = copy_failure_rate
        self.num_copied_blocks = 0
        self.stopped_ns: dict[Worker, Ns] = {}  # workers that do nothing, since when
        self.roles = roles
        for role in roles:
            self.add_worker(role)

    # ---- the only front end, where there is one

    @property
    def front(self) -> FrontCore:
        return self.fronts[0].core

    @property
    def outputs(self) -> dict[SeqId, list[int]]:
        return self.fronts[0].outputs

    @property
    def ends(self) -> dict[SeqId, Finish | Reject]:
        return self.fronts[0].ends

    @property
    def living(self) -> dict[SeqId, SeqSpec]:
        return self.fronts[0].living

    # ---- what happens

    def add_front(self) -> Front:
        """A front end that knows nothing; the workers tell it what they have."""
        router = RouterCore(self._router)
        front = Front(router, FrontCore(router, self._cluster), self.now)
        self.fronts.append(front)
        for worker in self.workers:
            worker.tell_all_cached(self._connect(worker, front))
        return front

    def lose_front(self, front: Front) -> None:
        """With its readers; what it has said last may never arrive."""
        self.fronts.remove(front)
        for worker in self.workers:
            for line in worker.lines:
                if line.front is front:
                    self._hang_up(line)
                    line.to_front.clear()

    def _connect(self, worker: Worker, front: Front) -> Line:
        line = Line(front, WorkerId(front.next_worker_id))
        front.next_worker_id += 1
        worker.lines.append(line)
        self.handle(
            WorkerUp(
                worker_id=line.worker_id,
                name=worker.name,
                spec=worker.spec,
                role=worker.role,
                kv_address=worker.name,
                kv_block_bytes=1000,
                step_tokens=self._step_tokens,
                cost=FittedCostModel.prior(),
            ),
            front,
        )
        return line

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
        """Under the name of one that died, where there is one."""
        if self._free_names:
            name = self._free_names.pop(0)
        else:
            name = f"w{self._num_workers}"
            self._num_workers += 1
        spec = WorkerSpec(
            model_digest="00" * 32,
            kv_dtype="bf16",
            block_size=16,
            num_blocks=self._num_blocks[self._num_workers % len(self._num_blocks)],
            max_model_len=256,
            vocab_size=VOCAB,
        )
        config = WorkerConfig(
            scheduler=SchedulerConfig(
                step_tokens=self._step_tokens, admission="optimistic", overlap="on"
            )
        )
        clock_ns = self.rng.randrange(self._most_clock_ns) if self._most_clock_ns else 0
        worker = Worker(name, spec, config, role, clock_ns)
        self.workers.append(worker)
        for front in self.fronts:
            self._connect(worker, front)

    def set_role(self, worker: Worker, role: Role) -> None:
        """It tells all front ends, after what it has said to them before."""
        worker.role = role
        for line in worker.lines:
            line.to_front.append(WorkerRole(line.worker_id, role))

    def lose_worker(self, worker: Worker) -> None:
        """What it has said and nobody has heard is lost with it."""
        self.workers.remove(worker)
        self.stopped_ns.pop(worker, None)
        self._free_names.append(worker.name)
        self.num_lost_workers += 1
        for line in worker.lines:
            if line.front in self.fronts:
                self.handle(WorkerDown(line.worker_id, "killed"), line.front)

    def cut(self, line: Line) -> None:
        """A front end gives a worker up that lives on: what it had sent may never arrive, what the
        worker said before it notices comes too late.
        """
        self._hang_up(line)
        self.handle(WorkerDown(line.worker_id, "silent"), line.front)

    def heal(self, worker: Worker, front: Front) -> Line:
        """It comes again, and tells what it has."""
        line = self._connect(worker, front)
        worker.tell_all_cached(line)
        return line

    def stop(self, worker: Worker) -> None:
        self.stopped_ns[worker] = self.now

    def wake(self, worker: Worker) -> None:
        del self.stopped_ns[worker]

    def _hang_up(self, line: Line) -> None:
        for _ in range(self.rng.randrange(len(line.to_worker) + 1)):
            line.to_worker.pop()
        line.to_worker.append(Gone())

    def submit(self, seqs: tuple[SeqSpec, ...], front: Front | None = None) -> None:
        front = front or self.fronts[0]
        front.living.update((spec.seq_id, spec) for spec in seqs)
        self.handle(Arrive(seqs), front)

    def cancel(self, seq_id: SeqId, front: Front | None = None) -> None:
        front = front or self.fronts[0]
        front.is_cancelled.add(seq_id)
        self.handle(Cancel(seq_id), front)

    def advance(self) -> bool:
        """One thing somewhere goes on, or time to the next one passes; False where nothing is left
        to.
        """
        if self.act():
            return True
        for front in self.fronts:
            if front.timers:
                at_ns, timer_id = min(front.timers)
                front.timers.remove((at_ns, timer_id))
                self.now = Ns(max(self.now, at_ns))
                self.handle(Timer(timer_id), front)
                return True
        return False

    def act(self) -> bool:
        """One thing goes on that need not wait; False where there is none."""
        actions: list[Callable[[], None]] = []
        for worker in self.workers:
            for line in worker.lines:
                if line.to_worker and worker not in self.stopped_ns:
                    actions.append(partial(self._deliver, worker, line))
                if line.to_front:
                    actions.append(partial(self._hear, line))
            if worker in self.stopped_ns:
                continue
            if worker.plans:
                actions.append(partial(self._end_step, worker))
            if self._copies_that_end(worker):
                actions.append(partial(self._end_copy, worker))
            if any(at_ns <= self.now for at_ns, _ in worker.timers):
                actions.append(partial(self._ring, worker))
        if actions:
            self.rng.choice(actions)()
        return bool(actions)

    @property
    def num_living(self) -> int:
        return sum(len(front.living) for front in self.fronts)

    @property
    def _is_busy(self) -> bool:
        return any(
            worker.plans
            or worker.copies
            or any(line.to_worker or line.to_front for line in worker.lines)
            for worker in self.workers
        )

    def run(self) -> None:
        """To the end of everything."""
        for _ in range(200_000):
            if not self.num_living or not self.advance():
                break
        assert not self.num_living, f"{self.num_living} sequences never end"
        while self._is_busy:
            self.advance()
        for front in self.fronts:
            front.core.check()
        for worker in self.workers:
            assert worker.core.is_idle

    def end_leases(self) -> None:
        """So much time passes that nothing is lent any more."""
        self.now = Ns(self.now + 60 * NS_PER_S)
        while any(at_ns <= self.now for worker in self.workers for at_ns, _ in worker.timers):
            self.advance()
        while self._is_busy:
            self.advance()

    def audit(self) -> None:
        """With which every scenario ends: all blocks are accounted for and held for nobody, front
        ends know what workers have, and one more request is served.
        """
        self.end_leases()
        for front in self.fronts:
            self._sweep(front)
            assert front.router.stats().num_in_flight == 0
        for worker in self.workers:
            worker.core.check()
            assert worker.core.stats().num_pinned_blocks == 0
            assert not any(line.scope.living() for line in worker.lines)
        if not self.can_decode:
            self.add_worker(Role.MIXED)
        for front in self.fronts:
            params = SamplingParams(max_tokens=9)
            spec = SeqSpec(seq_id=ONE_MORE, request_id="", prompt_tokens=(7,) * 40, params=params)
            self.submit((spec,), front)
            self.run()
            assert tuple(front.outputs[ONE_MORE]) == expected_output(spec)

    def _sweep(self, front: Front) -> None:
        """Until what was lost has gone from the index, and it has what workers have."""
        num_cached = sum(len(worker.cached) for worker in self.workers)
        for _ in range(2 * NUM_PARTS):
            if front.router.stats().num_replicas == num_cached:
                return
            front.router.handle(self.now, WorkersStarting(0))
        assert front.router.stats().num_replicas == num_cached

    def _tick(self) -> Ns:
        self.now = Ns(self.now + self.rng.randrange(1, 2_000_000))
        return self.now

    def _deliver(self, worker: Worker, line: Line) -> None:
        worker.receive(self._tick(), line)

    def _hear(self, line: Line) -> None:
        event = line.to_front.popleft()
        if line.front in self.fronts:
            self.handle(event, line.front)

    def _end_step(self, worker: Worker) -> None:
        result = worker.device.run(worker.plans.popleft())
        worker.handle(self._tick(), StepDone(result))

    def _copies_that_end(self, worker: Worker) -> list[StartCopy]:
        """All but those from a worker that has stopped just now."""
        if not self.stopped_ns:
            return worker.copies
        silent_ns = {one.name: stopped_ns + STALL_NS for one, stopped_ns in self.stopped_ns.items()}
        return [one for one in worker.copies if silent_ns.get(one.source, 0) <= self.now]

    def _end_copy(self, worker: Worker) -> None:
        """What the source has by now; or less, where something goes wrong on the way."""
        copies = self._copies_that_end(worker)
        copy = copies[self.rng.randrange(len(copies))]
        worker.copies.remove(copy)
        source = next((w for w in self.workers if w.name == copy.source), None)
        most = len(copy.names)
        if source in self.stopped_ns:
            most = self.rng.randrange(most + 1)
        num_blocks = 0
        for name, block_id in zip(copy.names, copy.block_ids, strict=True):
            if num_blocks == most or source is None or name not in source.cached:
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

    def handle(self, event: FrontEvent, front: Front) -> None:
        front.now = self._tick()
        for effect in front.core.handle(front.now, event):
            match effect:
                case Forward(worker_id, forwarded):
                    message = (
                        Submit(forwarded.seqs, self.now)
                        if isinstance(forwarded, Arrive)
                        else forwarded
                    )
                    self._line(front, worker_id).to_worker.append(message)
                case Resync(worker_id):
                    self._line(front, worker_id).to_worker.append(effect)
                case CallAt(at_ns, timer_id):
                    front.timers.append((at_ns, timer_id))
                case _:
                    front.read(effect)
        if self.rng.random() < 0.1:
            front.core.check()

    def _line(self, front: Front, worker_id: WorkerId) -> Line:
        return next(
            line
            for worker in self.workers
            for line in worker.lines
            if line.front is front and line.worker_id == worker_id
        )
