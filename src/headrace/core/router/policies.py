"""The policies: each picks one of the workers that could take a request.

Decides who is best under a policy's name; refuses to know why the others were filtered.
"""

from collections.abc import Sequence
from random import Random
from typing import Final

from headrace.core.router.fleet import Fleet
from headrace.core.router.pricing import Pricing
from headrace.core.router.worker import Worker

# `prefix` leaves a prefix alone where loads differ by that much (both), or the prefix is shorter
# than this share of the prompt; after SGLang's cache-aware router.
MAX_SEQS_APART: Final = 32
MAX_SEQS_RATIO: Final = 1.5
MIN_MATCH: Final = 0.3


class Chooser:
    """Holds what policies remember: where round robin is, and what chance has said."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._last_worker_id = -1

    def choose(
        self,
        policy: str,
        workers: Sequence[Worker],
        totals: list[float],
        pricing: Pricing,
        fleet: Fleet,
    ) -> tuple[int, int]:
        """(index of the chosen worker, how many were as good). `workers` has at least one."""
        match policy:
            case "kv":
                return self._least(totals)
            case "prefix":
                return self._prefix(workers, pricing)
            case "session":
                index = _home(workers, pricing.request.session, fleet)
                return (index, 1) if index is not None else self._least(pricing.loads(workers))
            case "least_loaded":
                return self._least(pricing.loads(workers))
            case "power_of_two":
                drawn = self._rng.sample(range(len(workers)), min(2, len(workers)))
                index, num_tied = self._least(pricing.loads([workers[i] for i in drawn]))
                return drawn[index], num_tied
            case "round_robin":
                return self._round_robin(workers), 1
            case _:
                return self._rng.randrange(len(workers)), len(workers)

    def _least(self, costs: list[float]) -> tuple[int, int]:
        least = min(costs)
        num_tied = costs.count(least)
        if num_tied == 1:
            return costs.index(least), 1
        tied = [index for index, cost in enumerate(costs) if cost == least]
        return self._rng.choice(tied), num_tied

    def _round_robin(self, workers: Sequence[Worker]) -> int:
        last = self._last_worker_id
        index = min(
            range(len(workers)),
            key=lambda i: (workers[i].worker_id <= last, workers[i].worker_id),
        )
        self._last_worker_id = workers[index].worker_id
        return index

    def _prefix(self, workers: Sequence[Worker], pricing: Pricing) -> tuple[int, int]:
        loads = pricing.loads(workers)
        nums = [worker.num_seqs for worker in workers]
        is_even = max(nums) - min(nums) <= MAX_SEQS_APART or max(nums) <= MAX_SEQS_RATIO * min(nums)
        depths = [pricing.num_hit_blocks(worker) for worker in workers]
        deepest = max(depths)
        least = pricing.request.num_tokens * MIN_MATCH
        if not is_even or deepest * workers[depths.index(deepest)].spec.block_size < least:
            return self._least(loads)
        holders = [index for index, depth in enumerate(depths) if depth == deepest]
        index, num_tied = self._least([loads[i] for i in holders])
        return holders[index], num_tied


def _home(workers: Sequence[Worker], session: str, fleet: Fleet) -> int | None:
    """The session's worker; its next one on the ring where that has no room."""
    if not session:
        return None
    indices = {worker.name: index for index, worker in enumerate(workers)}
    return next((indices[name] for name in fleet.ring.order(session) if name in indices), None)
