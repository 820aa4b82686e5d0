"""A choice with its reasons, small enough to keep."""

from collections.abc import Sequence
from math import inf
from typing import Final

import msgspec

from headrace.core.base.types import NS_PER_MS
from headrace.core.router.decision import Alternative, Decision, Filtered
from headrace.core.router.fleet import Survey
from headrace.core.router.pricing import Pricing
from headrace.core.router.waiting import Waiting
from headrace.core.router.worker import Worker

MAX_CANDIDATES: Final = 3
MAX_FILTERED: Final = 8  # workers for each reason


class DecisionLog:
    """The last decisions, by request; the oldest are forgotten first."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._decisions: dict[int, Decision] = {}

    def keep(self, decision: Decision, prompt_id: int) -> None:
        """Beside the one before it, of the same request or of its prompt."""
        before = self._decisions.pop(decision.request_id, None) or self._decisions.get(prompt_id)
        if before is not None:
            before = msgspec.structs.replace(before, before=None)
            decision = msgspec.structs.replace(decision, before=before)
        self._decisions[decision.request_id] = decision
        while len(self._decisions) > self._num_kept:
            del self._decisions[next(iter(self._decisions))]

    def find(self, request_id: int) -> Decision | None:
        return self._decisions.get(request_id)

    def observe(self, request_id: int, ttft_ms: float) -> None:
        """What became of the prediction."""
        decision = self._decisions.get(request_id)
        if decision is not None:
            self._decisions[request_id] = msgspec.structs.replace(decision, ttft_ms=ttft_ms)


class Choice:
    """What a policy has chosen among some workers, with their costs."""

    __slots__ = ("blind", "has_room", "index", "num_tied", "totals", "worker", "workers")

    def __init__(
        self,
        workers: list[Worker],
        totals: list[float],
        blind: int,
        index: int,
        num_tied: int,
        has_room: bool,
    ) -> None:
        self.workers = workers
        self.totals = totals
        self.blind = blind  # would be the cheapest if nobody had cached anything
        self.index = index
        self.num_tied = num_tied  # as good as the chosen one
        self.worker = workers[index]
        self.has_room = has_room


def explain(
    policy: str, waiting: Waiting, choice: Choice, survey: Survey, pricing: Pricing
) -> Decision:
    """Why a request goes where it goes."""
    workers, totals, index = choice.workers, choice.totals, choice.index
    cheapest = _least(totals, MAX_CANDIDATES)
    shown = [index, *(i for i in cheapest if i != index)][:MAX_CANDIDATES]
    others = {"kv": cheapest[0], "no_cache": choice.blind}
    others.pop(policy, None)
    return Decision(
        request_id=waiting.request.request_id,
        policy=policy,
        decided_ns=pricing.now,
        waited_ms=(pricing.now - waiting.since_ns) / NS_PER_MS,
        worker=choice.worker.name,
        worker_id=choice.worker.worker_id,
        candidates=tuple(pricing.candidate(workers[i], totals[i]) for i in shown),
        num_candidates=len(workers),
        num_tied=choice.num_tied,
        filtered=tuple(
            Filtered(reason, len(names), tuple(names[:MAX_FILTERED]))
            for reason, names in survey.filtered.items()
        ),
        alternatives=tuple(
            Alternative(by, workers[i].name, workers[i].worker_id, totals[i] / NS_PER_MS)
            for by, i in others.items()
        ),
        regret_ms=(totals[index] - totals[cheapest[0]]) / NS_PER_MS,
        asks_for=waiting.request.role,
        is_fallback=survey.is_fallback,
    )


def _least(costs: Sequence[float], count: int) -> list[int]:
    """The indices of the least, least first; for a few of many this is quicker than to sort."""
    rest = list(costs)
    found: list[int] = []
    for _ in range(min(count, len(rest))):
        found.append(rest.index(min(rest)))
        rest[found[-1]] = inf
    return found
