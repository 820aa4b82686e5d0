"""What is open after a test: files and threads of workers, of the test's own process, where front
ends live, and tasks of their servers.

A worker has a thread for each of its sockets and each pool that it reads, and a few more; so what
it has is known to the last one, however often others have come and gone.
"""

import asyncio
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.cluster.front import ClusterEngine

PATIENCE_S = 10.0
POOL = "/memfd:headrace-kv"
EVENTS = ".events."  # in the name of an event log that a test asks workers for
NUM_STANDARD = 3  # stdin, stdout, stderr
NUM_OWN_POOLS = 2  # the file and its mapping
NUM_OWN_THREADS = 3  # the main one, the engine's and the executor's
ENDED, STOPPED = "XZ", "T"  # a stopped one is in the middle of something, and stays there


def files(pid: int | str = "self") -> Counter[str]:
    """Open ones beyond the standard three, by kind: "socket", "pipe", or their path."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        if int(fd) >= NUM_STANDARD:
            with suppress(FileNotFoundError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target != f"/proc/{os.getpid()}/fd":  # by which they are listed
                    kinds[target.removesuffix(" (deleted)").split(":[")[0]] += 1
    return kinds


def excess_of_worker(pid: int, *, num_links: int, most_peers: int) -> str:
    """What a worker has that it should not; empty = nothing. It goes to `num_links` front ends by
    itself, and has met so many other workers at most.
    """
    try:
        if state_of(pid) in ENDED + STOPPED:
            return ""
        kinds, num_threads = files(pid), len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return ""  # it has ended just now
    num_sockets, num_pools = kinds.pop("socket", 0), kinds.pop(POOL, 0)
    has_engine = num_pools > 0
    num_lanes = max(0, num_pools - NUM_OWN_POOLS)
    right = 1 + num_links + num_sockets
    if has_engine:
        right = NUM_OWN_THREADS + num_links + num_sockets + num_lanes
    # A line to each front end, where it lends, and a way to and from each of the others.
    most_sockets = max(1, num_links) + 1 + 2 * most_peers
    faults = [
        *([f"{num_threads} threads, not {right}"] if num_threads != right else []),
        *([f"{num_sockets} sockets, not {most_sockets}"] if num_sockets > most_sockets else []),
        *([f"{num_lanes} pools of {most_peers} others"] if num_lanes > most_peers else []),
        *(f"{number} x {kind}" for kind, number in kinds.items() if EVENTS not in kind),
    ]
    return ", ".join(faults)


def is_ended(pid: int) -> bool:
    """Also where nobody has taken note of it yet."""
    return state_of(pid) in ENDED


def state_of(pid: int) -> str:
    """The letter that proc_pid_stat(5) has for it; "X" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def children() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
    return pids


@dataclass
class Holdings:
    """Of this process."""

    files: Counter[str]
    threads: set[threading.Thread]
    children: set[int]

    @classmethod
    def now(cls) -> "Holdings":
        return cls(files(), {*threading.enumerate()}, children())

    def excess_of(self, before: "Holdings", expected: set[int]) -> str:
        """What is there more than `before`, processes apart that are `expected`; empty = nothing.
        One may have taken another's place.
        """
        threads, gone = self.threads - before.threads, before.threads - self.threads
        orphans, ended = self.children - before.children - expected, before.children - self.children
        faults = [
            *(f"{number} x {kind} more" for kind, number in (self.files - before.files).items()),
            *([f"threads {[one.name for one in threads]}"] if len(threads) > len(gone) else []),
            *([f"processes {sorted(orphans)}"] if len(orphans) > len(ended) else []),
        ]
        return ", ".join(faults)


def excess_after(look: Callable[[], str]) -> str:
    """What is there too long; empty = nothing."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (excess := look()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return excess


@dataclass
class Watch:
    """Hears of every cluster and server that is opened and closed; keeps what they leave."""

    clusters: list[ClusterEngine] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_on: bool = False

    def note(self, who: str, look: Callable[[], str]) -> None:
        if self.is_on and (excess := excess_after(look)):
            self.faults.append(f"{who} has {excess}")

    def take(self) -> list[str]:
        """The faults so far, each once."""
        faults, self.faults = [*dict.fromkeys(self.faults)], []
        return faults

    def look_at(self, engine: ClusterEngine) -> None:
        """At its workers on this machine, those that have come by themselves apart."""
        most_peers = sum(worker.num_starts for worker in engine.workers())
        for worker in engine.workers():
            if worker.is_ready and worker.pid is not None:
                self.look_at_worker(worker.name, worker.pid, most_peers)

    def look_at_worker(self, name: str, pid: int, most_peers: int, *, num_links: int = 0) -> None:
        self.note(
            f"worker {name}",
            lambda: excess_of_worker(pid, num_links=num_links, most_peers=most_peers),
        )

    @property
    def living(self) -> set[int]:
        """Workers' processes; those that are just being started as well."""
        return {
            pid for engine in self.clusters for worker in engine.workers() if (pid := worker.pid)
        }

    def has_risen(self) -> bool:
        return all(worker.is_ready for engine in self.clusters for worker in engine.workers())


WATCH = Watch()


@contextmanager
def watched() -> Iterator[Watch]:
    """All clusters from here on, until the end."""
    opened, closed = ClusterEngine.__init__, ClusterEngine.close

    def open_watched(self: ClusterEngine, *args: object, **settings: object) -> None:
        opened(self, *args, **settings)  # type: ignore[arg-type]
        WATCH.clusters.append(self)

    def close_watched(self: ClusterEngine) -> None:
        if self in WATCH.clusters:
            WATCH.look_at(self)
            WATCH.clusters.remove(self)
        closed(self)

    ClusterEngine.__init__ = open_watched  # type: ignore[method-assign]
    ClusterEngine.close = close_watched  # type: ignore[method-assign]
    WATCH.is_on = True
    try:
        yield WATCH
    finally:
        WATCH.is_on = False
        WATCH.clusters.clear()
        WATCH.take()
        ClusterEngine.__init__ = opened  # type: ignore[method-assign]
        ClusterEngine.close = closed  # type: ignore[method-assign]


@contextmanager
def nothing_left(watch: Watch) -> Iterator[None]:
    """What is opened here is closed here; what lives on has no more than it had."""
    excess_after(lambda: "" if watch.has_risen() else "workers that start")
    gc.collect()
    before = Holdings.now()
    before.children -= watch.living
    watch.take()
    yield
    excess_after(lambda: "" if watch.has_risen() else "workers that start")
    for engine in watch.clusters:
        watch.look_at(engine)
    gc.collect()
    watch.note("this process", lambda: Holdings.now().excess_of(before, watch.living))
    assert not (faults := watch.take()), "; ".join(faults)


def num_tasks(loop: asyncio.AbstractEventLoop | None) -> int:
    """That live in this loop, the one that counts apart."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    if loop is None:
        raise RuntimeError("the server does not run")
    return asyncio.run_coroutine_threadsafe(count(), loop).result(10)


def excess_tasks(loop: asyncio.AbstractEventLoop | None, right: int) -> str:
    number = num_tasks(loop)
    return f"{number} tasks, not {right}" if number > right else ""
