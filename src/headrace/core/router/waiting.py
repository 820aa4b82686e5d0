"""Requests for which no worker has room: whose turn is next.

- Migrated requests go first; then priorities, where waiting makes up for a worse one.
- Among tenants of a priority, the one that got the least service (the virtual token counter of
  Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant that begins to
  wait starts at the least that the others have had, so that idleness is no credit.
- Of one tenant, the request with the least slack: that must start first to meet its TTFT limit. One
  that is late already makes nobody else late: it counts as if it had no limit.

A request may be held for one worker, whose queue is worth its cached prefix. Whoever got the first
room anywhere would scatter prefixes over all workers, just when there is no time to compute them.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from headrace.core.base.errors import InvariantError
from headrace.core.base.request import AGING_NS
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, WorkerId
from headrace.core.router.events import RouteRequest
from headrace.core.router.worker import Worker

# A request that fits nowhere, or not yet where it is held for, is overtaken for that long at most.
OVERTAKE_NS: Final = Ns(2 * NS_PER_S)
NO_LIMIT_NS: Final = 30 * NS_PER_S  # TTFT limit of requests without one
MAX_HEADS: Final = 8  # tenants that are asked where the first one's request fits nowhere
MANY_LEFT: Final = 64  # that are still in a lane's heaps, beside as many as wait
MAX_ABSENT: Final = 4096  # tenants of whom nothing waits, and what they have had is remembered
MIGRATED: Final = -(1 << 40)  # priority


class Waiting:
    __slots__ = ("held_for", "held_ns", "limit_ns", "order", "request", "since_ns", "start_by_ns")

    def __init__(self, now: Ns, request: RouteRequest, order: int = 0, prefill_ns: int = 0) -> None:
        """`prefill_ns` is predicted, with nothing cached."""
        self.request = request
        self.since_ns = now
        self.order = order
        self.held_for: WorkerId | None = None
        self.held_ns = prefill_ns  # work that it will be, where it is held
        self.limit_ns = now + NO_LIMIT_NS
        self.start_by_ns = self.limit_ns
        if request.slo.ttft_ms is not None:
            slack_ns = round(request.slo.ttft_ms * NS_PER_MS) - prefill_ns
            self.start_by_ns = request.arrived_ns + slack_ns

    @property
    def priority(self) -> int:
        return MIGRATED if self.request.is_migration else self.request.priority

    @property
    def lane(self) -> tuple[int, str]:
        return self.priority, self.request.tenant

    def is_passed_over(self, now: Ns) -> bool:
        """Whether others have gone before it for long enough."""
        return now - self.since_ns > OVERTAKE_NS

    def slack_key(self, now: Ns) -> tuple[int, int]:
        return self.start_by_ns if self.start_by_ns >= now else self.limit_ns, self.order


class _Lane:
    """Equals in priority and tenant that wait for the same worker, or for any: the one with the
    least slack is found without a look at the others. Time does not go back.
    """

    def __init__(self) -> None:
        self._members: dict[int, Waiting] = {}  # by their order
        # Their slack keys, and those of some that have left.
        self._timely: list[tuple[int, int]] = []
        self._late: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._members)

    def add(self, waiting: Waiting) -> None:
        self._members[waiting.order] = waiting
        heappush(self._timely, (waiting.start_by_ns, waiting.order))
        if len(self._timely) + len(self._late) > 2 * len(self._members) + MANY_LEFT:
            self._timely = [(one.start_by_ns, one.order) for one in self._members.values()]
            heapify(self._timely)
            self._late.clear()

    def remove(self, waiting: Waiting) -> None:
        del self._members[waiting.order]

    def head(self, now: Ns) -> Waiting:
        """Of a lane that is not empty."""
        members, timely, late = self._members, self._timely, self._late
        while timely and (timely[0][0] < now or timely[0][1] not in members):
            _, order = heappop(timely)
            if order in members:
                heappush(late, (members[order].limit_ns, order))
        while late and late[0][1] not in members:
            heappop(late)
        return members[min(heap[0] for heap in (timely, late) if heap)[1]]


class WaitingRoom:
    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        self._num_by_tenant: dict[str, int] = {}
        self._service: dict[str, float] = {}  # tokens by tenant, while anybody waits
        self._held_ns: dict[WorkerId | None, int] = {}  # sums by the worker that they are held for
        self._lanes: dict[WorkerId | None, dict[tuple[int, str], _Lane]] = {}  # by `held_for`
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def find(self, request_id: int) -> Waiting | None:
        return self._waiting.get(request_id)

    @property
    def prefill_ns(self) -> int:
        """Work of all that wait."""
        return sum(self._held_ns.values())

    def held_ns(self, worker_id: WorkerId | None) -> int:
        """Work that waits for this worker; for None, work that has no place."""
        return self._held_ns.get(worker_id, 0)

    # ---- changes

    def add(self, now: Ns, request: RouteRequest, prefill_ns: int) -> Waiting:
        tenant = request.tenant
        if tenant not in self._num_by_tenant:
            others = [self._service.get(other, 0.0) for other in self._num_by_tenant]
            self._serve(tenant, max(self._service.get(tenant, 0.0), min(others, default=0.0)))
        waiting = Waiting(now, request, self._num_arrived, prefill_ns)
        self._num_arrived += 1
        self._waiting[request.request_id] = waiting
        self._num_by_tenant[tenant] = self._num_by_tenant.get(tenant, 0) + 1
        self._enter(waiting)
        return waiting

    def remove(self, request_id: int) -> None:
        """Idempotent."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        self._leave(waiting)
        self._num_by_tenant[waiting.request.tenant] -= 1
        if not self._num_by_tenant[waiting.request.tenant]:
            del self._num_by_tenant[waiting.request.tenant]
        if not self._waiting:
            self._service.clear()

    def hold(self, waiting: Waiting, worker_id: WorkerId | None, prefill_ns: int) -> None:
        """Let it wait for this worker, where it will be that much work; None = for any."""
        self._leave(waiting)
        waiting.held_for, waiting.held_ns = worker_id, prefill_ns
        self._enter(waiting)

    def let_go(self, worker_id: WorkerId) -> None:
        """Nobody waits for this worker any more: any other will do."""
        if self._held_ns.get(worker_id):
            for waiting in self._waiting.values():
                if waiting.held_for == worker_id:
                    self.hold(waiting, None, waiting.held_ns)

    def _enter(self, waiting: Waiting) -> None:
        self._add_held(waiting.held_for, waiting.held_ns)
        self._lanes.setdefault(waiting.held_for, {}).setdefault(waiting.lane, _Lane()).add(waiting)

    def _leave(self, waiting: Waiting) -> None:
        self._add_held(waiting.held_for, -waiting.held_ns)
        lanes = self._lanes[waiting.held_for]
        lane = lanes[waiting.lane]
        lane.remove(waiting)
        if not len(lane):
            del lanes[waiting.lane]
        if not lanes:
            del self._lanes[waiting.held_for]

    def _add_held(self, worker_id: WorkerId | None, held_ns: int) -> None:
        total = self._held_ns.get(worker_id, 0) + held_ns
        if total:
            self._held_ns[worker_id] = total
        else:
            self._held_ns.pop(worker_id, None)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A request of this tenant was sent to a worker, whether it had waited or not."""
        if self._waiting:
            self._serve(tenant, self._service.get(tenant, 0.0) + num_tokens)

    def _serve(self, tenant: str, num_tokens: float) -> None:
        """It has had so many in all. Of very many tenants, as where somebody makes up a key for
        each request, those are forgotten that were served longest ago.
        """
        self._service.pop(tenant, None)
        self._service[tenant] = num_tokens
        if len(self._service) > 2 * MAX_ABSENT + len(self._num_by_tenant):
            absent = [one for one in self._service if one not in self._num_by_tenant]
            for one in absent[:-MAX_ABSENT]:
                del self._service[one]

    # ---- turns

    def owes(self, now: Ns, worker: Worker, request: RouteRequest) -> bool:
        """Whether this worker's room is for the first of those that are held for it, and not for a
        request that comes.
        """
        if worker.worker_id not in self._lanes or request.is_migration:
            return False
        return self.heads(now, worker.worker_id)[0].is_passed_over(now)

    def heads(self, now: Ns, worker_id: WorkerId) -> list[Waiting]:
        """The first of each tenant and priority that waits for this worker or for any, in the order
        in which they should be served; where nobody does, of all that wait. At most a few. Looks at
        one of each, however many there are.
        """
        mine = [self._lanes[key] for key in (None, worker_id) if key in self._lanes]
        first: dict[tuple[int, str], Waiting] = {}
        for lanes in mine or self._lanes.values():
            for key, lane in lanes.items():
                one = lane.head(now)
                head = first.get(key)
                if head is None or one.slack_key(now) < head.slack_key(now):
                    first[key] = one
        return sorted(first.values(), key=lambda one: self._turn_key(now, one))[:MAX_HEADS]

    def _turn_key(self, now: Ns, waiting: Waiting) -> tuple[int, float, int, int]:
        aged = waiting.priority - (now - waiting.since_ns) // AGING_NS
        served = self._service.get(waiting.request.tenant, 0.0)
        return aged, served, *waiting.slack_key(now)

    def check(self) -> None:
        """Raise InvariantError unless the sums are those of the requests that wait."""
        sums: dict[WorkerId | None, int] = {}
        for waiting in self._waiting.values():
            sums[waiting.held_for] = sums.get(waiting.held_for, 0) + waiting.held_ns
        sums = {worker_id: held_ns for worker_id, held_ns in sums.items() if held_ns}
        if sums != self._held_ns or sum(self._num_by_tenant.values()) != len(self._waiting):
            raise InvariantError("waiting work miscounted", counted=sums, kept=self._held_ns)
        num_in_lanes = sum(len(lane) for lanes in self._lanes.values() for lane in lanes.values())
        if num_in_lanes != len(self._waiting):
            raise InvariantError("lanes miscounted", lanes=num_in_lanes, all=len(self._waiting))
