"""What a routing decision costs: RouterCore with a large fleet and a large index, in one process.

Decides the fleet and the prompts that are measured; refuses to know a network: events come at once.

Every worker has cached a number of its own prompts and some that it shares with others, all of
`NUM_PROMPT_TOKENS` tokens. Prompts that are asked for share their first half with a cached one, and
come in an order that no cache of the CPU knows, each as new objects, as from a wire.

Times are those of the processor for this thread, the least of `NUM_PASSES` for each prompt, so that
what else the machine does counts little; the time on the wall, of all passes, is given beside them.
Between two passes over a prompt all others are asked for, so that it is as unknown as before.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from random import Random
from statistics import fmean
from typing import NamedTuple

import msgspec

from headrace.bench.dynamo import DynamoReport, is_installed, measure_dynamo
from headrace.bench.loads import Spread
from headrace.bench.memory import resident_bytes
from headrace.core.base.events import BlocksStored
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.types import BlockId, Ns, WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.core import RouterCore
from headrace.core.router.events import (
    Dispatch,
    RouteArrive,
    RouteDone,
    RouteRequest,
    RouteStarted,
    WorkerKv,
    WorkerLoad,
    WorkerStats,
    WorkerUp,
)

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 4096
NUM_BLOCKS = NUM_PROMPT_TOKENS // BLOCK_SIZE
SHARED_BY = 4  # workers that have each of the shared prompts
SHARED_PART = 4  # one in this many prompts is shared
NUM_PASSES = 3
BATCH = 64  # blocks of one event
NUM_IN_FLIGHT = 4  # requests for each worker, which give the workers unequal loads


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    num_workers: int
    num_replicas: int
    decision_us: Spread  # `handle(RouteArrive)`, from names to Dispatch
    decision_wall_us: Spread
    match_us: Spread  # of it, the index alone
    walk_us: Spread  # a plain walk through the same map, a look-up for each block
    blocks_per_s: float  # stored, by `handle(WorkerKv)`
    bytes_per_replica: float  # growth of the process's memory, names included
    mean_hit_blocks: float
    dynamo: DynamoReport | None = None  # where it is installed


def measure(num_workers: int, num_replicas: int, num_decisions: int) -> RouterReport:
    """Fill an index, and let the router decide over it."""
    rng = Random(1)
    core = RouterCore(RouterConfig())
    for index in range(num_workers):
        core.handle(Ns(0), _worker_up(index))
    before_bytes = resident_bytes()
    blocks_per_s, kept = _fill(core, rng, num_workers, num_replicas)
    bytes_per_replica = (resident_bytes() - before_bytes) / core.stats().num_replicas
    now = _settle(core, rng, num_workers)
    prompts = [_ask(rng, rng.choice(kept)) for _ in range(num_decisions)]
    passes = [_decide(core, now, index, prompts) for index in range(NUM_PASSES)]
    prefixes = core._caches.index
    return RouterReport(
        num_workers=num_workers,
        num_replicas=core.stats().num_replicas,
        decision_us=Spread.of(map(min, zip(*(one.cpu_us for one in passes), strict=True))),
        decision_wall_us=Spread.of(us for one in passes for us in one.wall_us),
        match_us=Spread.of(_time(prefixes.match, prompts)),
        walk_us=Spread.of(_time(prefixes.walk, prompts)),
        blocks_per_s=blocks_per_s,
        bytes_per_replica=bytes_per_replica,
        mean_hit_blocks=fmean(one.mean_hit_blocks for one in passes),
        dynamo=_dynamo(num_workers, num_replicas, prompts) if is_installed() else None,
    )


def _dynamo(
    num_workers: int, num_replicas: int, prompts: Sequence[Sequence[bytes]]
) -> DynamoReport:
    stored = (
        (index, _names(prompt))
        for prompt, owners in _contents(Random(1), num_workers, num_replicas)
        for index in owners
    )
    return measure_dynamo(stored, prompts, NUM_BLOCKS // 2, NUM_PASSES)


def _worker_up(index: int) -> WorkerUp:
    spec = WorkerSpec(
        model_digest="00",
        kv_dtype="bf16",
        block_size=BLOCK_SIZE,
        num_blocks=1 << 20,
        max_model_len=1 << 17,
        vocab_size=1 << 16,
    )
    return WorkerUp(worker_id=WorkerId(index), name=f"worker-{index}", spec=spec)


def _fill(
    core: RouterCore, rng: Random, num_workers: int, num_replicas: int
) -> tuple[float, list[bytes]]:
    """Let every worker publish its blocks; returns the rate, and the prompts (names in one piece)
    that may be asked for.
    """
    kept: list[bytes] = []
    elapsed_ns = num_stored = 0
    seq_nos = [0] * num_workers
    for prompt, owners in _contents(rng, num_workers, num_replicas):
        if len(kept) < 4096:
            kept.append(prompt)
        for index in owners:
            for event in _publications(index, seq_nos[index], _names(prompt)):
                started = time.thread_time_ns()
                core.handle(Ns(0), event)
                elapsed_ns += time.thread_time_ns() - started
            seq_nos[index] += NUM_BLOCKS // BATCH
            num_stored += NUM_BLOCKS
    return num_stored / elapsed_ns * 1e9, kept


def _contents(
    rng: Random, num_workers: int, num_replicas: int
) -> Iterator[tuple[bytes, list[int]]]:
    """Prompts (names in one piece), and the workers that have cached each."""
    num_stored = 0
    while num_stored < num_replicas:
        prompt = rng.randbytes(16 * NUM_BLOCKS)
        num_owners = SHARED_BY if rng.randrange(SHARED_PART) == 0 else 1
        owners = rng.sample(range(num_workers), min(num_owners, num_workers))
        num_stored += NUM_BLOCKS * len(owners)
        yield prompt, owners


def _publications(index: int, seq_no: int, names: Sequence[bytes]) -> Iterator[WorkerKv]:
    for start in range(0, len(names), BATCH):
        run = tuple(names[start : start + BATCH])
        changes = (BlocksStored(run, b"", (BlockId(0),) * len(run)),)
        yield WorkerKv(WorkerId(index), seq_no + start // BATCH, changes)


def _settle(core: RouterCore, rng: Random, num_workers: int) -> Ns:
    """Requests in flight, and what the workers tell of them."""
    now = Ns(0)
    for request_id in range(NUM_IN_FLIGHT * num_workers):
        now = Ns(now + 1_000_000)
        request = RouteRequest(
            request_id=-1 - request_id,
            block_names=tuple(_names(rng.randbytes(16 * 32))),
            num_tokens=512,
            arrived_ns=now,
        )
        core.handle(now, RouteArrive(request))
        if rng.random() < 0.9:
            core.handle(now, RouteStarted(request.request_id))
    for index in range(num_workers):
        load = WorkerLoad(
            num_running=4,
            num_waiting=0,
            num_queued_prefill_tokens=rng.randrange(1024),
            num_kv_tokens=4096,
            num_free_blocks=1 << 19,
            num_cached_blocks=1 << 19,
            num_pinned_blocks=0,
        )
        core.handle(now, WorkerStats(WorkerId(index), load))
    return now


class _Pass(NamedTuple):
    cpu_us: list[float]  # of each decision
    wall_us: list[float]
    mean_hit_blocks: float


def _decide(core: RouterCore, now: Ns, index: int, prompts: Sequence[Sequence[bytes]]) -> _Pass:
    cpu_us: list[float] = []
    wall_us: list[float] = []
    num_hits = 0
    for request_id, names in enumerate(prompts, index * len(prompts)):
        at_ns = Ns(now + 1_000 * request_id)
        request = RouteRequest(
            request_id=request_id,
            block_names=tuple(_fresh(names)),
            num_tokens=NUM_PROMPT_TOKENS + 7,
            arrived_ns=at_ns,
        )
        event = RouteArrive(request)
        started, started_cpu = time.perf_counter_ns(), time.thread_time_ns()
        effects = core.handle(at_ns, event)
        cpu_us.append((time.thread_time_ns() - started_cpu) / 1e3)
        wall_us.append((time.perf_counter_ns() - started) / 1e3)
        (dispatch,) = effects
        assert isinstance(dispatch, Dispatch)
        num_hits += dispatch.decision.chosen.num_hit_blocks
        core.handle(at_ns, RouteDone(request_id))
    return _Pass(cpu_us, wall_us, num_hits / len(prompts))


def _ask(rng: Random, prompt: bytes) -> list[bytes]:
    """A prompt that shares its first half with a cached one."""
    half = 8 * NUM_BLOCKS
    return _names(prompt[:half] + rng.randbytes(half))


def _names(prompt: bytes) -> list[bytes]:
    return [prompt[start : start + 16] for start in range(0, len(prompt), 16)]


def _fresh(names: Sequence[bytes]) -> list[bytes]:
    """The same names as objects whose hash nobody has computed."""
    return _names(b"".join(names))


def _time(
    find: Callable[[Sequence[bytes]], object], prompts: Sequence[Sequence[bytes]]
) -> list[float]:
    """The least time of `NUM_PASSES` for each."""
    taken_us = [inf] * len(prompts)
    for _ in range(NUM_PASSES):
        for index, prompt in enumerate(prompts):
            names = _fresh(prompt)
            started = time.thread_time_ns()
            find(names)
            taken_us[index] = min(taken_us[index], (time.thread_time_ns() - started) / 1e3)
    return taken_us
