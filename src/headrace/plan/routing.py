"""Which worker gets a request, and how much of its prompt is there already: three policies.

A worker keeps every prefix that it was given. Its load is the number of its requests: those of the
last `hold_s`, or, as on a public teaching page, all of them. The policies are the page's; those of
the production router also know queues, tiers and limits, and need a simulated clock.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from headrace.core.workload.traces import TraceRequest


class Policy(StrEnum):
    ROUND_ROBIN = "round robin"
    LOAD_AWARE = "load-aware"
    KV_AWARE = "KV-aware"


# The page's run follows from weights of 2.86 to 4.28 requests for a whole prompt; it is left open
# which one is used.
REFERENCE_KV_WEIGHT: Final = 3.0
REFERENCE_WORKERS: Final = 4
REFERENCE_REQUESTS: Final = 20
REFERENCE_RATIO: Final = 0.7
REFERENCE_PROMPT_TOKENS: Final = 800
REFERENCE_PREFILL_TOKENS_PER_S: Final = 50_000.0


class RoutingSetup(msgspec.Struct, frozen=True, kw_only=True):
    num_workers: int = REFERENCE_WORKERS
    kv_weight: float = REFERENCE_KV_WEIGHT  # requests that a whole uncached prompt counts as
    hold_s: float | None = None  # how long a request counts as load; None = for ever
    prefill_tokens_per_s: float = REFERENCE_PREFILL_TOKENS_PER_S


class Assignment(msgspec.Struct, frozen=True):
    """Where a request went. Workers count from 0."""

    worker: int
    cached_tokens: int


class PolicyRun(msgspec.Struct, frozen=True, kw_only=True):
    policy: Policy
    num_hits: int  # requests of which something was there
    num_shareable: int  # requests that have a prefix at all
    cached_tokens: int
    cached_share: float  # of all prompt tokens
    saved_prefill_ms: float
    num_requests_by_worker: tuple[int, ...]
    max_load: int  # requests that a worker had at once
    assignments: tuple[Assignment, ...]


class _Worker:
    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.leaving_s: deque[float] = deque()
        self.num_requests = 0
        self.load = 0

    def cached_tokens(self, request: TraceRequest) -> int:
        """Of the longest prefix that is here; the last block of a prompt may be part of one."""
        depth = 0
        for block in request.blocks:
            if block not in self.blocks:
                break
            depth += 1
        return min(depth * request.block_tokens, request.prompt_tokens)

    def take(self, request: TraceRequest, hold_s: float | None) -> None:
        self.blocks.update(request.blocks)
        self.num_requests += 1
        self.load += 1
        if hold_s is not None:
            self.leaving_s.append(request.arrival_s + hold_s)

    def let_go(self, now_s: float) -> None:
        while self.leaving_s and self.leaving_s[0] <= now_s:
            self.leaving_s.popleft()
            self.load -= 1


def reference_stream(
    ratio: float = REFERENCE_RATIO, num_requests: int = REFERENCE_REQUESTS
) -> list[TraceRequest]:
    """A stream of prompts of which a share begins alike, and which share that much of the prompt.

    The page does not say how it draws its order; this congruence gives the page's own order for a
    ratio of 0.7 and stands in for the others.
    """
    shared_tokens = round(ratio * REFERENCE_PROMPT_TOKENS)
    return [
        TraceRequest(
            arrival_s=0.0,
            prompt_tokens=REFERENCE_PROMPT_TOKENS,
            output_tokens=0,
            blocks=(0,) if (29 * i + 20) % 100 < 100 * ratio else (),
            block_tokens=shared_tokens,
        )
        for i in range(num_requests)
    ]


def run_policy(policy: Policy, requests: Sequence[TraceRequest], setup: RoutingSetup) -> PolicyRun:
    """Requests are in the order of their arrival. O(requests · workers · blocks of a prompt)."""
    workers = [_Worker() for _ in range(setup.num_workers)]
    assignments, max_load = [], 0
    for index, request in enumerate(requests):
        for worker in workers:
            worker.let_go(request.arrival_s)
        chosen = choose(policy, index, request, workers, setup.kv_weight)
        cached = workers[chosen].cached_tokens(request)
        workers[chosen].take(request, setup.hold_s)
        max_load = max(max_load, workers[chosen].load)
        assignments.append(Assignment(chosen, cached))
    cached_tokens = sum(one.cached_tokens for one in assignments)
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    return PolicyRun(
        policy=policy,
        num_hits=sum(one.cached_tokens > 0 for one in assignments),
        num_shareable=sum(bool(request.blocks) for request in requests),
        cached_tokens=cached_tokens,
        cached_share=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        saved_prefill_ms=cached_tokens / setup.prefill_tokens_per_s * 1000,
        num_requests_by_worker=tuple(worker.num_requests for worker in workers),
        max_load=max_load,
        assignments=tuple(assignments),
    )


def choose(
    policy: Policy,
    index: int,
    request: TraceRequest,
    workers: Sequence[_Worker],
    kv_weight: float,
) -> int:
    """Ties go to the lowest worker."""
    match policy:
        case Policy.ROUND_ROBIN:
            return index % len(workers)
        case Policy.LOAD_AWARE:
            costs = [float(worker.load) for worker in workers]
        case Policy.KV_AWARE:
            costs = [
                worker.load
                + kv_weight * (1 - worker.cached_tokens(request) / request.prompt_tokens)
                for worker in workers
            ]
    return costs.index(min(costs))


def cumulative_cached_tokens(run: PolicyRun, num_points: int) -> Iterator[tuple[float, float]]:
    """(requests so far, tokens that were there), at about so many points."""
    step = max(1, len(run.assignments) // num_points)
    total = 0
    yield 0.0, 0.0
    for number, one in enumerate(run.assignments, 1):
        total += one.cached_tokens
        if number % step == 0 or number == len(run.assignments):
            yield float(number), float(total)
