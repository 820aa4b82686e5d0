"""What a router knows of a worker's cache, whatever becomes of the messages about it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.base.events import KvChange
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.config.schema import RouterConfig
from headrace.core.router.caches import Caches
from headrace.core.router.events import WorkerKv, WorkerKvSnapshot, WorkerUp
from headrace.core.router.fleet import Fleet
from support.routing import names, removed, spec, stored

NAMES = names("a", 12)
WORKER = WorkerId(0)


class FeedMachine(RuleBasedStateMachine):
    """A worker whose messages are lost, doubled and late, in any order, snapshots included."""

    def __init__(self) -> None:
        super().__init__()
        config = RouterConfig()
        fleet = Fleet(config)
        self.now = Ns(0)
        self.caches = Caches(config, fleet)
        up = WorkerUp(worker_id=WORKER, name="w", spec=spec())
        self.worker = fleet.add(self.now, up, self.caches.index.open_slot())
        self.cached: dict[bytes, None] = {}
        self.next_no = 0
        self.on_the_way: list[WorkerKv | WorkerKvSnapshot] = []
        self.is_asked = False

    def hear(self, event: WorkerKv | WorkerKvSnapshot) -> None:
        self.is_asked |= self.caches.hear(self.now, self.worker, event)

    def say(self, changes: tuple[KvChange, ...]) -> WorkerKv:
        event = WorkerKv(WORKER, self.next_no, changes)
        self.next_no += len(changes)
        return event

    def snapshot(self) -> WorkerKvSnapshot:
        self.is_asked = False
        return WorkerKvSnapshot(WORKER, self.next_no, tuple(self.cached))

    @rule(flipped=st.sets(st.sampled_from(NAMES), min_size=1, max_size=4))
    def change(self, flipped: set[bytes]) -> None:
        changes: list[KvChange] = []
        for name in sorted(flipped):
            if name in self.cached:
                del self.cached[name]
                changes += removed(name)
            else:
                self.cached[name] = None
                changes += stored(name)
        self.on_the_way.append(self.say(tuple(changes)))

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives", "twice", "lost"]))
    def deliver(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.on_the_way) - 1))
        event = self.on_the_way[index] if fate == "twice" else self.on_the_way.pop(index)
        if fate != "lost":
            self.hear(event)

    @precondition(lambda self: self.is_asked)
    @rule()
    def answer(self) -> None:
        self.on_the_way.append(self.snapshot())

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now = Ns(self.now + round(seconds * NS_PER_S))

    @invariant()
    def replicas_are_counted_right(self) -> None:
        self.caches.index.check()

    def teardown(self) -> None:
        """All that is on its way comes at last. Then one change that arrives, and what is asked for
        because of it, make the index what the cache is; and old messages do not change that.
        """
        late = list(self.on_the_way)
        for event in late:
            self.hear(event)
        self.settle()
        for event in reversed(late):
            self.hear(event)
        self.settle()

    def settle(self) -> None:
        for _ in range(3):
            self.now = Ns(self.now + 2 * NS_PER_S)
            name = NAMES[0]
            is_cached = name in self.cached
            self.hear(self.say(removed(name) if is_cached else stored(name)))
            if is_cached:
                del self.cached[name]
            else:
                self.cached[name] = None
            if self.is_asked:
                self.hear(self.snapshot())
        assert self.worker.feed.is_whole
        assert not self.is_asked
        index = self.caches.index
        known = {name for name in NAMES if index.workers_with(name) & self.worker.bit}
        assert known == set(self.cached)


FeedMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestFeedMachine = FeedMachine.TestCase
