"""Front ends that know nothing of each other ask the same workers to be for something else, and
each word takes its time: somebody decodes at every moment, and in the end all agree.
"""

from collections import deque
from concurrent.futures import Future
from random import Random

import pytest

from headrace.cluster.ballot import DECODING, RoleBallot, Said
from headrace.cluster.fleet import Slot
from headrace.cluster.roles import SetWorkerRole
from headrace.cluster.wire import RoleVote, SetRole, ToWorker
from headrace.core.base.errors import RequestError
from headrace.core.base.worker import Role
from support.seeds import FEW_AND_A_THOUSAND
from unit.cluster.test_crew import Rig, Voice, ready


class Way:
    """Between a front end and a worker: what is on it, in its order."""

    def __init__(self, rig: Rig, slot: Slot, ballot: "RoleBallot[Way]") -> None:
        assert isinstance(slot.process, Voice)
        self.rig, self.slot, self.ballot = rig, slot, ballot
        self.sent: list[ToWorker] = slot.process.sent
        self.num_heard = len(self.sent)
        self.said: deque[Said] = deque()

    @property
    def is_empty(self) -> bool:
        return self.num_heard == len(self.sent) and not self.said

    def to_worker(self) -> None:
        if self.num_heard == len(self.sent):
            return
        message = self.sent[self.num_heard]
        self.num_heard += 1
        match message:
            case SetRole(role):
                self.ballot.ask(self, role)
            case RoleVote(vote_id, agrees):
                self.ballot.hear(self, vote_id, agrees=agrees)

    def to_front(self) -> None:
        if self.said:
            self.rig.say(self.slot, self.said.popleft())


class World:
    def __init__(self, num_fronts: int, num_workers: int) -> None:
        self.rigs = [Rig() for _ in range(num_fronts)]
        self.ballots = [
            RoleBallot[Way](Role.DECODE, lambda way, said: way.said.append(said))
            for _ in range(num_workers)
        ]
        self.ways: list[Way] = []
        for rig in self.rigs:
            for ballot in self.ballots:
                slot, _ = rig.come(Role.DECODE)
                rig.say(slot, ready(role=Role.DECODE))
                self.ways.append(Way(rig, slot, ballot))
                ballot.join(self.ways[-1])

    def move(self, rng: Random) -> None:
        """Some word arrives."""
        way = rng.choice(self.ways)
        rng.choice((way.to_worker, way.to_front))()
        assert any(ballot.role in DECODING for ballot in self.ballots)

    def ask(self, rng: Random) -> "Future[None]":
        done: Future[None] = Future()
        rig = rng.choice(self.rigs)
        role = rng.choice((Role.PREFILL, Role.PREFILL, Role.DECODE))
        name = rng.choice([slot.name for slot in rig.fleet])
        rig.crew.roles.ask(SetWorkerRole(name, role, done))
        return done


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("num_fronts", [2, 3])
@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_somebody_decodes_whatever_is_asked(
    seeds: range, num_fronts: int, num_workers: int
) -> None:
    num_done = num_refused = 0
    for seed in seeds:
        rng = Random(seed)
        world = World(num_fronts, num_workers)
        wishes = []
        for _ in range(300):
            if rng.random() < 0.1:
                wishes.append(world.ask(rng))
            world.move(rng)
        while not all(way.is_empty for way in world.ways):
            world.move(rng)
        for way in world.ways:
            assert (way.slot.role, way.slot.asked_role) == (way.ballot.role, None), seed
        for wish in wishes:
            error = wish.exception(0)
            assert error is None or isinstance(error, RequestError)
            num_refused += error is not None and "another front end" in error.message
            num_done += error is None
        for rig in world.rigs:
            rig.crew.end()
    assert num_done > 3 * len(seeds)
    assert num_refused > len(seeds) // 2
