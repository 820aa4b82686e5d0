"""A replica that only takes time: where a day of a fleet must pass in seconds.

It stands in for a worker's EngineCore, and is no second one: it knows no blocks, no lanes and no
preemption, only what the cost model says of steps. A step computes the prompts that wait, in order,
as far as the limit of ITL allows, and one token of each sequence that decodes. Steps that only
decode pass many at a time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from headrace.core.autoscaler.capacity import Replica, fewest
from headrace.core.autoscaler.events import ReplicaLoad
from headrace.core.base.types import NS_PER_MS, Ns, WorkerId
from headrace.core.cost.model import StepShape
from headrace.sim.runtime import SimRuntime


@dataclass(slots=True, eq=False)
class Job:
    """A request, and what became of it. Lost work is done again; its first token stays sent."""

    arrived_ns: Ns
    num_prompt: int
    num_uncached: int
    num_output: int
    first_ns: Ns | None = None
    done_ns: Ns | None = None
    num_left: int = 0  # of the uncached tokens, while its prompt is computed

    @property
    def ttft_ms(self) -> float:
        assert self.first_ns is not None
        return (self.first_ns - self.arrived_ns) / NS_PER_MS

    @property
    def tpot_ms(self) -> float:
        """Mean gap between its tokens; 0 where there is only one."""
        assert self.first_ns is not None
        assert self.done_ns is not None
        gaps = self.num_output - 1
        return (self.done_ns - self.first_ns) / NS_PER_MS / gaps if gaps else 0.0


OnDone: TypeAlias = Callable[["SimReplica", Job], None]


class SimReplica:
    """`on_done(replica, job)` is called when a request has its last token."""

    def __init__(
        self,
        replica_id: WorkerId,
        replica: Replica,
        itl_ms: float,
        runtime: SimRuntime,
        on_done: OnDone,
    ) -> None:
        self.replica_id = replica_id
        self.ended: list[Job] = []  # since the last look
        self._replica = replica
        self._itl_ns = itl_ms * NS_PER_MS
        self._runtime = runtime
        self._on_done = on_done
        self._queue: deque[Job] = deque()
        self._running: list[tuple[int, int, Job]] = []  # heap by the step of the last token
        self._num_kv = 0
        self._num_queued = 0  # prompt tokens to compute
        self._num_steps = 0
        self._num_started = 0
        self._leap: tuple[Ns, int, int] | None = None  # begin, time and number of steps under way
        self._turn = 0  # calls for an earlier turn are void
        self._chunks: dict[tuple[int, int, int], int] = {}

    # ---- queries

    @property
    def num_jobs(self) -> int:
        return len(self._queue) + len(self._running)

    def jobs(self) -> list[Job]:
        return [*self._queue, *(job for _, _, job in self._running)]

    @property
    def queue_ns(self) -> int:
        """Prefill that is due, in chunks beside what decodes."""
        if not self._num_queued:
            return 0
        chunk = self._chunk(self._queue[0])
        return round(self._num_queued / chunk * self._step_ns(chunk, self._queue[0]))

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            replica_id=self.replica_id,
            queue_ms=self.queue_ns / NS_PER_MS,
            num_running=len(self._running),
            num_kv_tokens=self._num_kv,
            num_cached_tokens=self._num_steps,  # the longer it served, the more it has seen
        )

    # ---- changes

    def add(self, job: Job) -> None:
        job.num_left = job.num_uncached
        self._queue.append(job)
        self._num_queued += job.num_uncached
        if self._leap is None:
            self._start()
        else:
            self._cut_leap()

    def stop(self) -> None:
        """It is dead: nothing of it happens any more."""
        self._turn += 1

    # ---- steps

    def _start(self) -> None:
        """The next step, or as many as pass before anything changes."""
        if not self.num_jobs:
            self._leap = None
            return
        num_prefill, num_steps = 0, 1
        has_room = len(self._running) < self._replica.max_running_seqs
        if self._queue and (has_room or not self._running):
            num_prefill = min(self._num_queued, self._chunk(self._queue[0]))
        else:
            num_steps = self._running[0][0] - self._num_steps
        step_ns = self._step_ns(num_prefill, self._queue[0] if num_prefill else None)
        self._leap = (self._runtime.now, step_ns, num_steps)
        self._call(step_ns * num_steps, num_prefill, num_steps)

    def _call(self, delay_ns: int, num_prefill: int, num_steps: int) -> None:
        self._turn += 1
        turn = self._turn
        self._runtime.call_later(Ns(delay_ns), lambda: self._end(turn, num_prefill, num_steps))

    def _cut_leap(self) -> None:
        """Whoever comes waits for the step that runs, not for all of them."""
        assert self._leap is not None
        begin_ns, step_ns, num_steps = self._leap
        if num_steps > 1:
            passed = max(1, -(-(self._runtime.now - begin_ns) // step_ns))
            if passed < num_steps:
                self._leap = (begin_ns, step_ns, passed)
                self._call(begin_ns + passed * step_ns - self._runtime.now, 0, passed)

    def _end(self, turn: int, num_prefill: int, num_steps: int) -> None:
        if turn != self._turn:
            return
        self._num_steps += num_steps
        self._num_kv += num_steps * len(self._running)
        while self._running and self._running[0][0] <= self._num_steps:
            self._finish(heappop(self._running)[2])
        self._num_queued -= num_prefill
        while num_prefill:
            job = self._queue[0]
            part = min(num_prefill, job.num_left)
            job.num_left -= part
            num_prefill -= part
            if not job.num_left:
                self._begin(self._queue.popleft())
        self._start()

    def _begin(self, job: Job) -> None:
        """Its prompt is computed, and the first token is there."""
        if job.first_ns is None:
            job.first_ns = self._runtime.now
        self._num_kv += job.num_prompt + 1
        if job.num_output == 1:
            self._finish(job)
            return
        self._num_started += 1
        last = self._num_steps + job.num_output - 1
        heappush(self._running, (last, self._num_started, job))

    def _finish(self, job: Job) -> None:
        self._num_kv -= job.num_prompt + job.num_output
        job.done_ns = self._runtime.now
        self.ended.append(job)
        self._on_done(self, job)

    # ---- costs

    def _chunk(self, job: Job) -> int:
        """Prompt tokens of a step that keeps the limit of ITL for those that decode."""
        most = max(1, self._replica.step_tokens - len(self._running))
        if not self._running:
            return most
        # Near enough is near enough: what differs little shares an answer.
        key = (len(self._running), self._num_kv // 1024, job.num_prompt // 256)
        if (known := self._chunks.get(key)) is None:
            shrink = fewest(lambda n: self._step_ns(most - n, job) <= self._itl_ns, 0, most - 1)
            known = self._chunks[key] = most - shrink
        return known

    def _step_ns(self, num_prefill: int, job: Job | None) -> int:
        n = len(self._running)
        before = job.num_prompt - job.num_left if job else 0
        num_seqs = n + (num_prefill > 0)
        shape = StepShape(
            n + num_prefill,
            num_seqs,
            num_seqs,
            self._num_kv + num_prefill * before + num_prefill * num_prefill // 2,
            self._num_kv + before + num_prefill,
        )
        return self._replica.cost.step_ns(shape)
