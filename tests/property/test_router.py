"""RouterCore under any order of events, and its index against sets."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.base.events import CallAt, Timer
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.core import WATCH_TIMER, RouterCore
from headrace.core.router.events import (
    Dispatch,
    Queued,
    Resync,
    RouteArrive,
    RouteDone,
    RouteFailed,
    RouteProgress,
    RouteReject,
    RouteRequest,
    RouterEvent,
    RouteStarted,
    WorkerDown,
    WorkerDrain,
    WorkerKv,
    WorkerKvSnapshot,
    WorkerStats,
    WorkerUp,
)
from headrace.core.router.index import PrefixIndex
from support.routing import load, names, removed, spec, stored

CHAINS = [names(text, 12) for text in "abc"]
WORDS = {name for chain in CHAINS for name in chain}
POLICIES = ["kv", "prefix", "session", "least_loaded", "power_of_two", "round_robin", "random"]


class RouterMachine(RuleBasedStateMachine):
    """The model knows where each request is: waiting, at a living worker, or nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Ns(0)
        self.core = RouterCore(RouterConfig(worker_queue_ms=500, max_waiting_requests=6))
        self.place: dict[int, WorkerId | None] = {}  # None = waits in the router
        self.alive: dict[WorkerId, str] = {}
        self.draining: set[WorkerId] = set()
        self.num_workers = 0
        self.num_requests = 0
        self.timers: list[CallAt] = []

    def tell(self, event: RouterEvent) -> None:
        for effect in self.core.handle(self.now, event):
            match effect:
                case Dispatch(request_id, worker_id, decision):
                    assert self.place.get(request_id, None) is None
                    assert worker_id in self.alive
                    assert worker_id not in self.draining
                    assert decision.worker_id == worker_id
                    self.place[request_id] = worker_id
                case Queued(request_id):
                    assert request_id not in self.place
                    self.place[request_id] = None
                case RouteReject(request_id):
                    assert self.place.pop(request_id, None) is None
                case Resync(worker_id):
                    assert worker_id in self.alive
                case CallAt(at_ns):
                    assert at_ns >= self.now
                    self.timers.append(effect)

    @rule(
        milliseconds=st.integers(0, 3000),
    )
    def wait(self, milliseconds: int) -> None:
        self.now = Ns(self.now + milliseconds * NS_PER_MS)
        while due := [timer for timer in self.timers if timer.at_ns <= self.now]:
            self.timers.remove(due[0])
            self.tell(Timer(due[0].timer_id))

    @rule(name=st.sampled_from(["x", "y", "z"]), publishes=st.booleans())
    def up(self, name: str, publishes: bool) -> None:
        worker_id = WorkerId(self.num_workers)
        self.num_workers += 1
        self.alive[worker_id] = name
        self.tell(
            WorkerUp(
                worker_id=worker_id,
                name=name,
                spec=spec(num_blocks=64, max_model_len=600),
                max_running_seqs=3,
                publishes_kv=publishes,
            )
        )

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), is_failure=st.booleans())
    def down(self, data: st.DataObject, is_failure: bool) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.alive)))
        del self.alive[worker_id]
        lost = [request_id for request_id, at in self.place.items() if at == worker_id]
        for request_id in lost:
            del self.place[request_id]
        self.tell(WorkerDown(worker_id, "", is_failure))
        for request_id in lost:
            self.arrive(0, 12, 1, 0, "", excluded=(worker_id,), request_id=request_id)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.draining.add(worker_id)
        self.tell(WorkerDrain(worker_id))

    @rule(
        chain=st.integers(0, 2),
        num_blocks=st.integers(0, 12),
        num_choices=st.integers(1, 3),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "t"]),
        ttft_ms=st.sampled_from([None, 100.0, 5000.0]),
        deadline_ms=st.sampled_from([None, 1, 2000]),
    )
    def arrive(
        self,
        chain: int,
        num_blocks: int,
        num_choices: int,
        priority: int,
        tenant: str,
        ttft_ms: float | None = None,
        deadline_ms: int | None = None,
        excluded: tuple[WorkerId, ...] = (),
        request_id: int | None = None,
    ) -> None:
        if request_id is None:
            request_id = self.num_requests
            self.num_requests += 1
        deadline_ns = None if deadline_ms is None else Ns(self.now + deadline_ms * NS_PER_MS)
        request = RouteRequest(
            request_id=request_id,
            block_names=CHAINS[chain][:num_blocks],
            num_tokens=num_blocks * 16 + 3,
            num_choices=num_choices,
            priority=priority,
            tenant=tenant,
            slo=Slo(ttft_ms=ttft_ms),
            deadline_ns=deadline_ns,
            arrived_ns=self.now,
            excluded=excluded,
            is_migration=bool(excluded),
        )
        self.tell(RouteArrive(request))

    def some_request(self, data: st.DataObject) -> int:
        return int(data.draw(st.integers(0, max(0, self.num_requests))))

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.tell(RouteStarted(self.some_request(data)))

    @rule(data=st.data(), num_tokens=st.integers(0, 50))
    def progress(self, data: st.DataObject, num_tokens: int) -> None:
        self.tell(RouteProgress(self.some_request(data), num_tokens))

    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        request_id = self.some_request(data)
        self.place.pop(request_id, None)
        self.tell(RouteFailed(request_id) if fails else RouteDone(request_id))

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(),
        num_running=st.sampled_from([0, 1, 5, float("nan"), -1]),
        num_waiting=st.integers(0, 3),
        num_queued=st.sampled_from([0, 100, 5000]),
        num_received=st.sampled_from([None, 0, 2, 50]),
    )
    def stats(
        self,
        data: st.DataObject,
        num_running: float,
        num_waiting: int,
        num_queued: int,
        num_received: int | None,
    ) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.alive)))
        told = load(
            num_running=num_running,
            num_waiting=num_waiting,
            num_queued_prefill_tokens=num_queued,
            num_free_blocks=20,
        )
        self.tell(WorkerStats(worker_id, told, num_received))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), seq_no=st.integers(0, 6), chain=st.integers(0, 2), remove=st.booleans())
    def kv(self, data: st.DataObject, seq_no: int, chain: int, remove: bool) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.alive)))
        part = CHAINS[chain][:3]
        changes = removed(*part) if remove else stored(*part)
        self.tell(WorkerKv(worker_id, seq_no, changes))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), seq_no=st.integers(0, 6), chain=st.integers(0, 2))
    def snapshot(self, data: st.DataObject, seq_no: int, chain: int) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.tell(WorkerKvSnapshot(worker_id, seq_no, CHAINS[chain]))

    @invariant()
    def laws_hold(self) -> None:
        self.core.check()

    @invariant()
    def every_request_has_one_place(self) -> None:
        stats = self.core.stats()
        assert stats.num_waiting == sum(at is None for at in self.place.values())
        assert stats.num_in_flight == sum(at is not None for at in self.place.values())

    @invariant()
    def whoever_waits_is_looked_after(self) -> None:
        if None in self.place.values():
            assert any(timer.timer_id == WATCH_TIMER for timer in self.timers)

    def teardown(self) -> None:
        """Whatever happened, when all is done nothing is left, and the next request is served."""
        for request_id in list(self.place):
            self.place.pop(request_id, None)
            self.tell(RouteDone(request_id))
        assert not self.place
        self.core.check()
        self.up("fresh", publishes=True)
        self.arrive(0, 4, 1, 0, "")
        assert self.place[self.num_requests - 1] is not None


RouterMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRouterMachine = RouterMachine.TestCase


class IndexMachine(RuleBasedStateMachine):
    """Against a set of names for each worker that is closed under taking prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(Ns(120 * NS_PER_S))
        self.depths: dict[int, list[int]] = {}  # by bit: of each chain

    @precondition(lambda self: len(self.depths) < 5)
    @rule()
    def join(self) -> None:
        self.depths[self.index.open_slot()] = [0] * len(CHAINS)

    @precondition(lambda self: self.depths)
    @rule(data=st.data(), chain=st.integers(0, 2), depth=st.integers(0, 12))
    def change(self, data: st.DataObject, chain: int, depth: int) -> None:
        bit = data.draw(st.sampled_from(sorted(self.depths)))
        old = self.depths[bit][chain]
        self.depths[bit][chain] = depth
        self.index.apply(bit, stored(*CHAINS[chain][old:depth]))
        gone = reversed(CHAINS[chain][depth:old])
        self.index.apply(bit, removed(*gone))

    @precondition(lambda self: self.depths)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        bit = data.draw(st.sampled_from(sorted(self.depths)))
        del self.depths[bit]
        self.index.close_slot(bit)

    @rule(count=st.sampled_from([1, 100, 5000]))
    def tend(self, count: int) -> None:
        for _ in range(count):
            self.index.tend(Ns(0))

    @invariant()
    def matches_are_those_of_the_sets(self) -> None:
        for number, chain in enumerate(CHAINS):
            expected = {bit: d[number] for bit, d in self.depths.items() if d[number]}
            found: dict[int, int] = {}
            for workers, depth in self.index.match(chain):
                found |= {bit: depth for bit in self.depths if bit & workers}
            assert found == expected
            assert self.index.match(chain) == self.index.walk(chain)
        self.index.check()


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase
