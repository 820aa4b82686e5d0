"""Requests that wait for a prefill worker when there is none any more."""

import pytest

from headrace.core.base.events import Arrive, Cancel, Finish, Timer
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig
from headrace.core.router.core import WATCH_TIMER, RouterCore
from headrace.core.router.events import WorkerDown, WorkerDrain, WorkerRole, WorkerUp
from headrace.core.router.front import FrontCore
from headrace.core.router.front_events import Forward, FrontEvent, WorkerSaid
from support.routing import spec

PREFILL, DECODE = WorkerId(0), WorkerId(1)
NUM_SESSIONS = 60
NUM_REQUESTS = 4


class Fronting:
    """One worker of each kind; the one for prompts takes one of them at a time."""

    def __init__(self) -> None:
        router = RouterCore(RouterConfig(worker_queue_ms=50.0, worker_wait_s=5.0))
        self.core = FrontCore(router, ClusterConfig(handoff="always"))
        self.now_s = 0
        for worker_id, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE)):
            self.tell(WorkerUp(worker_id=worker_id, name=role, spec=spec(), role=role))

    def tell(self, event: FrontEvent) -> list[tuple[WorkerId, SeqId]]:
        """Which sequences go where."""
        effects = self.core.handle(Ns(self.now_s * NS_PER_S), event)
        self.core.check()
        sent = [effect for effect in effects if isinstance(effect, Forward)]
        return [
            (one.worker_id, seq.seq_id)
            for one in sent
            if isinstance(one.event, Arrive)
            for seq in one.event.seqs
        ]

    def arrive(self) -> list[tuple[WorkerId, SeqId]]:
        sent = []
        for number in range(NUM_REQUESTS):
            prompt = tuple((7 * number + i) % 90 + 1 for i in range(400))
            params = SamplingParams(max_tokens=20)
            one = SeqSpec(
                seq_id=SeqId(number), request_id=f"r{number}", prompt_tokens=prompt, params=params
            )
            sent += self.tell(Arrive((one,)))
        return sent

    def wait(self, seconds: int) -> list[tuple[WorkerId, SeqId]]:
        sent = []
        for _ in range(seconds):
            self.now_s += 1
            sent += self.tell(Timer(WATCH_TIMER))
        return sent


@pytest.mark.parametrize(
    "event",
    [
        WorkerDown(PREFILL, "killed"),
        WorkerDrain(PREFILL),
        WorkerRole(PREFILL, Role.DECODE),
        WorkerRole(PREFILL, Role.MIXED),
    ],
    ids=["lost", "leaving", "decodes", "mixed"],
)
def test_they_go_to_one_that_decodes(event: FrontEvent) -> None:
    fronting = Fronting()
    assert fronting.arrive() == [(PREFILL, 0)]
    fronting.tell(Cancel(SeqId(2)))
    sent = fronting.tell(event) + fronting.wait(10)
    takers = {DECODE, PREFILL} if isinstance(event, WorkerRole) else {DECODE}
    assert {worker_id for worker_id, _ in sent} <= takers
    assert {seq_id for _, seq_id in sent} >= {1, 3}
    assert fronting.core.num_unrouted == 0


def test_they_wait_where_another_one_is_left() -> None:
    fronting = Fronting()
    other = WorkerId(2)
    fronting.tell(WorkerUp(worker_id=other, name="other", spec=spec(), role=Role.PREFILL))
    assert {worker_id for worker_id, _ in fronting.arrive()} == {PREFILL, other}
    assert fronting.core.num_unrouted == 2
    fronting.tell(WorkerDrain(PREFILL))
    assert fronting.core.waiting_for() == [Role.PREFILL] * 2
    fronting.tell(WorkerDown(PREFILL, "gone", is_failure=False))
    assert fronting.core.waiting_for() == [Role.PREFILL] * 3
    fronting.tell(Cancel(SeqId(3), FinishReason.CANCELLED))
    assert fronting.core.waiting_for() == [Role.PREFILL] * 2


def test_a_word_of_a_worker_that_is_gone_means_nothing() -> None:
    fronting = Fronting()
    fronting.tell(WorkerDown(PREFILL, "killed"))
    assert fronting.tell(WorkerRole(PREFILL, Role.DECODE)) == []
    assert {worker_id for worker_id, _ in fronting.arrive()} == {DECODE}


def test_requests_that_wait_for_one_that_decodes_have_whoever_does_so_now() -> None:
    fronting = Fronting()
    fronting.tell(WorkerDown(DECODE, "killed"))
    assert fronting.arrive() == []
    sent = fronting.tell(WorkerRole(PREFILL, Role.MIXED)) + fronting.wait(10)
    assert {worker_id for worker_id, _ in sent} == {PREFILL}
    assert fronting.core.num_unrouted < NUM_REQUESTS


class Sessions:
    """Five workers, and requests of many sessions, each over at once."""

    def __init__(self) -> None:
        self.core = FrontCore(RouterCore(RouterConfig(policy="session")), ClusterConfig())
        self.num_seqs = 0
        for number in range(5):
            self.tell(WorkerUp(worker_id=WorkerId(number), name=f"w{number}", spec=spec()))

    def tell(self, event: FrontEvent) -> list[Forward]:
        effects = self.core.handle(Ns(0), event)
        self.core.check()
        return [effect for effect in effects if isinstance(effect, Forward)]

    def homes(self) -> list[WorkerId]:
        return [self.home(f"session {number}") for number in range(NUM_SESSIONS)]

    def home(self, session: str) -> WorkerId:
        seq_id = SeqId(self.num_seqs)
        self.num_seqs += 1
        prompt = tuple(range(1 + self.num_seqs % 50))
        one = SeqSpec(
            seq_id=seq_id,
            request_id=f"r{seq_id}",
            prompt_tokens=prompt,
            params=SamplingParams(max_tokens=9),
            session=session,
            tenant="somebody",
        )
        (sent,) = self.tell(Arrive((one,)))
        assert isinstance(sent.event, Arrive)
        (seq,) = sent.event.seqs
        assert (seq.session, seq.tenant) == ("", "")  # what no worker needs to know
        words = (Finish(seq_id, FinishReason.LENGTH, len(prompt), 0, 0, 0),)
        self.tell(WorkerSaid(sent.worker_id, words))
        return sent.worker_id


def test_a_session_stays_at_its_worker_and_moves_only_when_that_leaves() -> None:
    sessions = Sessions()
    homes = sessions.homes()
    assert sessions.homes() == homes
    assert {homes.count(WorkerId(number)) > 2 for number in range(5)} == {True}
    for event in (WorkerDrain(WorkerId(3)), WorkerDown(WorkerId(3), "gone", is_failure=False)):
        sessions.tell(event)
        now = sessions.homes()
        assert WorkerId(3) not in now
        assert [home for home, before in zip(now, homes, strict=True) if before != 3] == [
            home for home in homes if home != 3
        ]
    sessions.tell(WorkerUp(worker_id=WorkerId(5), name="w3", spec=spec()))
    assert [3 if home == 5 else home for home in sessions.homes()] == homes  # by its name
