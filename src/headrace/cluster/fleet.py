"""The supervisor: which worker processes run, and when one that was lost is started again.

A worker that ends, falls silent or sends what is none of ours is lost: its process is killed, so
that nobody hears of it again, and another one takes its place, at once after a long good life and
later and later after each short one. One that was asked to leave goes with its slot, or comes back.
Decides when a process is started or given up; refuses to know what it works on.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Final, NamedTuple

from headrace.cluster.placement.process import Awaited
from headrace.cluster.process import RemoteProcess, WorkerProcess
from headrace.cluster.wire import Configure, Hello, Ready
from headrace.core.base.names import one_line
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.stats import EngineStats
from headrace.core.workload.recording import PoolFacts

BEGINNING: Final = Ns(0)
GOOD_LIFE_NS: Final = Ns(10 * NS_PER_S)  # ready for so long, its end is no sign of a fault
START_TIMEOUT_S: Final = 60.0  # until a process says its first word
# Of the silence that is allowed: a machine on which workers load may let them do nothing else.
LOADING_TIMEOUTS: Final = 6
MAX_DOUBLINGS: Final = 6  # of the wait before a start
MAX_BAD_STARTS: Final = 5  # in a row, after which a worker that was never ready is given up
MAX_GONE: Final = 1024  # names that are remembered though nobody has them
_LETTERS: Final = {Role.PREFILL: "p", Role.DECODE: "d", Role.MIXED: "w"}

# Counts since a worker's start, which add up over its lives; the others are its state.
_COUNTS: Final = (
    "num_preemptions",
    "num_recomputed_tokens",
    "num_queried_tokens",
    "num_hit_tokens",
    "num_steps",
    "num_failed_steps",
    "num_computed_tokens",
    "num_failed_loads",
)


class Cause(StrEnum):
    """Why a worker was lost, for figures."""

    ENDED = "ended"  # its process has
    SILENT = "silent"
    CONNECTION = "connection"  # it was cut, or brought what is none of ours
    UNFIT = "unfit"  # it cannot serve as it is configured
    MISFIT = "misfit"  # it serves something else than the others
    ENGINE_FAILED = "engine_failed"
    CANARY_WRONG = "canary_wrong"
    CANARY_FAILED = "canary_failed"
    CANARY_LATE = "canary_late"


@dataclass(slots=True)
class Leaving:
    """A worker is to end as soon as it has nothing in flight, and in time anyway."""

    until_ns: Ns
    comes_back: bool  # another one takes its place


BY_CANARY: Final = (Cause.CANARY_WRONG, Cause.CANARY_FAILED, Cause.CANARY_LATE)


@dataclass(slots=True)
class Slot:
    """A worker through all its lives. Only the Fleet changes it."""

    name: str
    role: Role
    is_remote: bool = False  # it has come by itself, and ends with its process
    process: WorkerProcess | None = None
    worker_id: WorkerId | None = None  # of this life, once it is ready
    ready: Ready | None = None  # of its last life
    stats: EngineStats | None = None  # as last heard
    cost: FittedCostModel | None = None  # likewise: what its steps take
    ready_ns: Ns = BEGINNING
    heard_ns: Ns = BEGINNING
    heard_deaf_ns: int = 0  # how long nobody had listened by then, in all
    has_spoken: bool = False  # in this life
    has_loaded: bool = False  # likewise
    loading: tuple[str, int, int] | None = None  # while it does: the stage, done, in all
    restart_ns: Ns = BEGINNING
    num_starts: int = 0
    num_short_lives: int = 0  # in a row
    fault: str = ""  # why it was lost, last
    cause: Cause | None = None  # the same, for figures
    losses: Counter[Cause] = field(default_factory=Counter)  # of all who had this name
    num_bad_canaries: int = 0  # lives that ended by one
    leaving: Leaving | None = None
    asked_role: Role | None = None  # what it is to be for, and has not said that it is

    @property
    def is_ready(self) -> bool:
        return self.worker_id is not None

    @property
    def next_role(self) -> Role:
        """That it has as far as it is asked for, now or soon."""
        return self.role if self.asked_role is None else self.asked_role

    @property
    def has_come(self) -> bool:
        return self.process is not None and not isinstance(self.process, Awaited)


class _Past(NamedTuple):
    """What is remembered of a name."""

    num_starts: int
    losses: Counter[Cause]
    cause: Cause | None
    fault: str


class Fleet:
    """`launch` starts a process, `configure` says what it is told first; `start_timeout_s` is the
    time to its first word. All times are of one monotonic clock.
    """

    def __init__(
        self,
        config: ClusterConfig,
        configure: Callable[[Slot], Configure],
        launch: Callable[[Slot], WorkerProcess],
        *,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.config = config
        self._start_timeout_s = start_timeout_s
        self.configure = configure
        self._launch = launch
        self._slots: list[Slot] = []
        self._next_worker_id = 0
        self._deaf_ns = 0  # how long nobody has listened, in all
        self._past = dict.fromkeys(_COUNTS, 0)  # of lives that are over
        # Of slots that are gone, by name, the longest gone first: for whoever has the name next.
        # Names that come from other machines may be new each time.
        self._gone: dict[str, _Past] = {}
        for role, num_workers in (
            (Role.PREFILL, config.prefill),
            (Role.DECODE, config.decode),
            (Role.MIXED, config.workers),
        ):
            for _ in range(num_workers):
                self.grow(role)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def of_worker(self, worker_id: WorkerId) -> Slot | None:
        return next((slot for slot in self._slots if slot.worker_id == worker_id), None)

    @property
    def is_hopeless(self) -> bool:
        """Whether no worker has ever been ready, and none will ever be."""
        return (
            bool(self._slots)
            and not self._next_worker_id
            and all(slot.num_short_lives >= MAX_BAD_STARTS for slot in self._slots)
        )

    @property
    def num_starting(self) -> int:
        """Processes that are about to be ready."""
        return sum(
            slot.process is not None and not slot.is_ready and slot.leaving is None
            for slot in self._slots
        )

    def grow(self, role: Role) -> Slot:
        """One worker more, which `start_due` starts. Its name is the first one that is free."""
        return self._new_slot(_LETTERS[role], role, is_remote=False)

    def _new_slot(self, prefix: str, role: Role, *, is_remote: bool) -> Slot:
        taken = {slot.name for slot in self._slots}
        names = (f"{prefix}{number}" for number in count())
        name = next(name for name in names if name not in taken)
        slot = Slot(name, role, is_remote)
        if past := self._gone.pop(name, None):
            slot.num_starts, slot.losses, slot.cause, slot.fault = past
        self._slots.append(slot)
        return slot

    def let_in(self, now: Ns, process: RemoteProcess, hello: Hello) -> Slot | None:
        """A worker that has come from elsewhere: one that was sent for, or one more. None where
        whoever sent for it does not wait any more, or none may come by itself.
        """
        if not hello.ticket:
            return None if self.config.on else self.add_remote(now, process, hello)
        for slot in self._slots:
            awaited = slot.process
            if isinstance(awaited, Awaited) and awaited.ticket == hello.ticket:
                slot.process = awaited.arrive(process)
                return slot
        return None

    def add_remote(self, now: Ns, process: WorkerProcess, hello: Hello) -> Slot:
        """A worker that has come by itself, and is told what to do."""
        slot = self._new_slot(f"{hello.name}-", hello.role, is_remote=True)
        self._begin(slot, now, process)
        return slot

    def _begin(self, slot: Slot, now: Ns, process: WorkerProcess) -> None:
        slot.process = process
        self._note(slot, now)
        slot.has_spoken, slot.has_loaded, slot.loading = False, False, None
        slot.num_starts += 1
        process.send(self.configure(slot))

    def start_due(self, now: Ns) -> list[Slot]:
        """Start those whose time has come, and say which. OSError where a process cannot be had."""
        due = [slot for slot in self._slots if slot.process is None and slot.restart_ns <= now]
        for slot in due:
            self._begin(slot, now, self._launch(slot))
        return due

    def heard(
        self,
        slot: Slot,
        now: Ns,
        stats: EngineStats | None,
        cost: FittedCostModel | None = None,
    ) -> None:
        """It lives, and this is its state, and what its steps take, if they are known."""
        self._note(slot, now)
        slot.has_spoken = True
        slot.stats = stats or slot.stats
        slot.cost = cost or slot.cost

    def loads(self, slot: Slot, stage: str, done: int, total: int) -> None:
        slot.loading = stage, done, total

    def loaded(self, slot: Slot, ready: Ready) -> None:
        """It could serve, as far as it knows."""
        slot.has_loaded, slot.loading = True, None
        self.set_role(slot, ready.role)

    def is_up(self, slot: Slot, now: Ns, ready: Ready) -> WorkerId:
        """It is ready: the id of this life, which no other one has."""
        slot.worker_id = WorkerId(self._next_worker_id)
        self._next_worker_id += 1
        self._note(slot, now)
        slot.ready, slot.ready_ns = ready, now
        slot.has_loaded = True
        return slot.worker_id

    def ask_role(self, slot: Slot, role: Role | None) -> None:
        """It is asked to be for something else. Should it be lost before it says that it is, the
        next life of it begins so.
        """
        slot.asked_role = role

    def set_role(self, slot: Slot, role: Role) -> None:
        """By its own word. What it was asked for later is still to come."""
        slot.role = role
        if role is slot.asked_role:
            slot.asked_role = None

    def overslept(self, num_ns: int) -> None:
        """Nobody has listened for so long, who would have: what was said is still to be read, and
        who was stopped together with the listener could not say anything.
        """
        self._deaf_ns += num_ns

    def _note(self, slot: Slot, now: Ns) -> None:
        slot.heard_ns, slot.heard_deaf_ns = now, self._deaf_ns

    def silent(self, now: Ns) -> list[Slot]:
        """Those that have said nothing for too long while somebody listened."""
        return [
            slot
            for slot in self._slots
            if slot.process is not None and now > self._silent_from(slot)
        ]

    def lose(self, slot: Slot, now: Ns, cause: Cause, reason: str) -> None:
        """End this life, and plan the next."""
        assert slot.process is not None
        slot.process.kill()
        if slot.is_ready and now - slot.ready_ns >= GOOD_LIFE_NS:
            slot.num_short_lives = 0
        delay_s = 0.0
        if slot.num_short_lives or not slot.is_ready:
            doublings = min(slot.num_short_lives, MAX_DOUBLINGS)
            delay_s = self.config.restart_delay_s * 2**doublings
        slot.num_short_lives += 1
        slot.restart_ns = Ns(now + round(delay_s * NS_PER_S))
        slot.fault, slot.cause = one_line(reason), cause
        slot.num_bad_canaries += cause in BY_CANARY
        slot.losses[cause] += 1
        self._end_life(slot)

    def restart_in_s(self, slot: Slot, now: Ns) -> float | None:
        """Until another life of it begins; None = it lives, or nobody takes its place."""
        if slot.process is not None or all(slot is not one for one in self._slots):
            return None
        return max(0.0, (slot.restart_ns - now) / NS_PER_S)

    def leave(self, slot: Slot, until_ns: Ns, *, comes_back: bool) -> None:
        """It shall end, at the latest then."""
        slot.leaving = Leaving(until_ns, comes_back)

    def end(self, slot: Slot, now: Ns) -> None:
        """It leaves by now: this life is over, and another one begins where one is to come back."""
        assert slot.leaving is not None
        slot.num_short_lives, slot.restart_ns = 0, now
        self._end_life(slot)

    def _end_life(self, slot: Slot) -> None:
        if slot.stats is not None:
            for name in _COUNTS:
                self._past[name] += getattr(slot.stats, name)
        self.set_role(slot, slot.next_role)
        leaving = slot.leaving
        slot.process = slot.worker_id = slot.stats = slot.leaving = None
        if slot.is_remote if leaving is None else not leaving.comes_back:
            self._remove(slot)

    def _remove(self, slot: Slot) -> None:
        self._slots = [other for other in self._slots if other is not slot]
        self._gone[slot.name] = _Past(slot.num_starts, slot.losses, slot.cause, slot.fault)
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def next_ns(self) -> Ns | None:
        """When there is something to do without a word from anybody; None = never."""
        times = [
            slot.restart_ns if slot.process is None else Ns(self._silent_from(slot) + 1)
            for slot in self._slots
        ]
        return min(times, default=None)

    def lives(self, now: Ns) -> list[Ready]:
        """What each serves with; none as long as one does not yet that is not silent elsewhere."""
        limit_s = self.config.silence_timeout_s
        awaited = [
            slot.ready if slot.is_ready else None
            for slot in self._slots
            if slot.is_ready or not slot.is_remote or now <= self._after_silence(slot, limit_s)
        ]
        lives = [ready for ready in awaited if ready is not None]
        return lives if len(lives) == len(awaited) else []

    def _silent_from(self, slot: Slot) -> Ns:
        limit_s = self._start_timeout_s
        if slot.has_spoken:
            limit_s = self.config.silence_timeout_s * (1 if slot.has_loaded else LOADING_TIMEOUTS)
        return self._after_silence(slot, limit_s)

    def _after_silence(self, slot: Slot, limit_s: float) -> Ns:
        deaf_ns = self._deaf_ns - slot.heard_deaf_ns
        return Ns(slot.heard_ns + deaf_ns + round(limit_s * NS_PER_S))

    def pool_facts(self) -> tuple[PoolFacts, ...]:
        """The workers that are ready, by role; of each role the one with most steps stands for the
        others.
        """
        pools = []
        for role in Role:
            slots = [slot for slot in self._slots if slot.role is role and slot.is_ready]
            known = [
                (slot.cost or slot.ready.cost, slot.ready)
                for slot in slots
                if slot.ready is not None
            ]
            if not known:
                continue
            cost, ready = max(known, key=lambda one: one[0].num_samples)
            pools.append(
                PoolFacts(
                    role=role,
                    num_workers=len(known),
                    spec=ready.spec,
                    config=ready.config.worker,
                    cost=cost,
                    kv_block_bytes=ready.kv.block_bytes,
                )
            )
        return tuple(pools)

    def stats(self) -> EngineStats:
        """Of all workers together, as last heard; counts go on through all their lives."""
        counts = [name for name in EngineStats.__struct_fields__ if name != "full_step_ns"]
        sums = dict.fromkeys(counts, 0) | self._past
        for slot in self._slots:
            if slot.stats is not None:
                for name in sums:
                    sums[name] += getattr(slot.stats, name)
        return EngineStats(**sums)
