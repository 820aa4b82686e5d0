"""Requests for which no worker has room: whose turn is next.

- Migrated requests go first; then priorities, where waiting makes up for a worse one.
- Among tenants of a priority, the one that got the least service (the virtual token counter of
  Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant that begins to
  wait starts at the least that the others have had, so that idleness is no credit.
- Of one tenant, the request with the least slack: that must start first to meet its TTFT limit. One
  that is late already makes nobody else late: it counts as if it had no limit.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, nsmallest
from typing import Final

from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns
from headrace.core.router.events import RouteRequest

NO_LIMIT_NS: Final = 30 * NS_PER_S  # TTFT limit of requests without one
AGING_NS: Final = 10 * NS_PER_S  # of waiting that make up for one step of priority
MAX_HEADS: Final = 8  # that are tried where the first one fits nowhere
MIGRATED: Final = -(1 << 40)  # priority
MIN_HEAP: Final = 64


class Waiting:
    __slots__ = ("is_late", "order", "prefill_ns", "request", "since_ns")

    def __init__(self, request: RouteRequest, since_ns: Ns, order: int, prefill_ns: int) -> None:
        self.request = request
        self.since_ns = since_ns
        self.order = order
        self.prefill_ns = prefill_ns  # predicted, with nothing cached
        self.is_late = False

    def start_by_ns(self) -> int:
        limit_ms = None if self.is_late else self.request.slo.ttft_ms
        if limit_ms is None:
            return self.since_ns + NO_LIMIT_NS
        return self.request.arrived_ns + round(limit_ms * NS_PER_MS) - self.prefill_ns


_Lane = list[tuple[int, int, int]]  # heap of (start by, order, request id); some are gone


class WaitingRoom:
    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._service: dict[str, float] = {}  # tokens by tenant, while anybody waits
        self._num_arrived = 0
        self.prefill_ns = 0  # of all that wait

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def find(self, request_id: int) -> Waiting | None:
        return self._waiting.get(request_id)

    def add(self, now: Ns, request: RouteRequest, prefill_ns: int) -> None:
        waiting = Waiting(request, now, self._num_arrived, prefill_ns)
        self._num_arrived += 1
        key = MIGRATED if request.is_migration else request.priority, request.tenant
        if not any(tenant == request.tenant for _, tenant in self._lanes):
            others = [self._service.get(tenant, 0.0) for _, tenant in self._lanes]
            served = self._service.get(request.tenant, 0.0)
            self._service[request.tenant] = max(served, min(others, default=0.0))
        self._waiting[request.request_id] = waiting
        lane = self._lanes.setdefault(key, [])
        heappush(lane, (waiting.start_by_ns(), waiting.order, request.request_id))
        self.prefill_ns += prefill_ns

    def remove(self, request_id: int) -> Waiting | None:
        """Idempotent."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self.prefill_ns -= waiting.prefill_ns
            if not self._waiting:
                self._lanes.clear()
                self._service.clear()
        return waiting

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A request of this tenant was sent to a worker, whether it had waited or not."""
        if self._waiting:
            self._service[tenant] = self._service.get(tenant, 0.0) + num_tokens

    def heads(self, now: Ns) -> list[Waiting]:
        """The first of each lane, in the order in which they should be served; at most a few."""
        found: list[tuple[float, float, int, int, Waiting]] = []
        for (priority, tenant), lane in list(self._lanes.items()):
            head = self._head(lane, now)
            if head is None:
                del self._lanes[priority, tenant]
                continue
            aged = priority - (now - head.since_ns) // AGING_NS
            key = (aged, self._service.get(tenant, 0.0), head.start_by_ns(), head.order)
            found.append((*key, head))
        return [entry[-1] for entry in nsmallest(MAX_HEADS, found, key=lambda entry: entry[:4])]

    def _head(self, lane: _Lane, now: Ns) -> Waiting | None:
        if len(lane) > 2 * len(self._waiting) + MIN_HEAP:
            lane[:] = [entry for entry in lane if self._is_current(entry)]
            heapify(lane)
        while lane:
            waiting = self._waiting.get(lane[0][2])
            if waiting is None or not self._is_current(lane[0]):
                heappop(lane)
            elif lane[0][0] < now and not waiting.is_late:
                heappop(lane)
                waiting.is_late = True
                heappush(lane, (waiting.start_by_ns(), waiting.order, waiting.request.request_id))
            else:
                return waiting
        return None

    def _is_current(self, entry: tuple[int, int, int]) -> bool:
        waiting = self._waiting.get(entry[2])
        return (
            waiting is not None and waiting.order == entry[1] and waiting.start_by_ns() == entry[0]
        )
