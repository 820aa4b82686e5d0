"""Several front ends over the same workers, all of which die and come back at any moment: whoever
lives hears every token, nothing is held for the dead, and who comes again knows what is cached.
"""

from random import Random

import pytest

from headrace.core.base.worker import Role
from headrace.core.router.events import WorkerLoad, WorkerStats
from sim.test_lost_workers import SPLIT, check_readers, requests
from support.cluster_world import ClusterWorld

MIXED = (Role.MIXED,) * 3


class Fates:
    """All front ends ask for the same, under the same ids. One that dies has a successor, which
    asks for all of it again.
    """

    def __init__(self, seed: int, **settings: object) -> None:
        self.rng = Random(seed)
        self.world = ClusterWorld(seed, num_fronts=2, **settings)  # type: ignore[arg-type]
        self.asked = requests(seed % 10)
        self.num_submitted = [0, 0]
        self.num_lost_fronts = 0

    def run(self) -> None:
        world, rng = self.world, self.rng
        while world.num_living or min(self.num_submitted) < len(self.asked):
            self.submit()
            if rng.random() < 0.01 and self.num_lost_fronts < 6:
                self.replace_front()
            if rng.random() < 0.005 and world.workers:
                world.lose_worker(rng.choice(world.workers))
            missing = world.missing_roles
            if missing and (not world.can_decode or rng.random() < 0.03):
                world.add_worker(missing[-1] if not world.can_decode else rng.choice(missing))
            self.cancel()
            world.advance()
        world.run()

    def submit(self) -> None:
        for front, num in zip(self.world.fronts, self.num_submitted, strict=True):
            if num < len(self.asked) and self.rng.random() < 0.05:
                self.num_submitted[self.world.fronts.index(front)] += 1
                self.world.submit(self.asked[num], front)

    def cancel(self) -> None:
        front = self.rng.choice(self.world.fronts)
        if front.living and self.rng.random() < 0.002:
            self.world.cancel(self.rng.choice(list(front.living)), front)

    def replace_front(self) -> None:
        number = self.rng.randrange(2)
        self.world.lose_front(self.world.fronts[number])
        del self.num_submitted[number]
        self.world.add_front()
        self.num_submitted.append(0)
        self.num_lost_fronts += 1

    def check(self, seed: int) -> None:
        for front in self.world.fronts:
            check_readers(front, seed)
        self.world.audit()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("roles", [MIXED, SPLIT], ids=["mixed", "split"])
def test_nobody_hears_of_anothers_death(seed: int, roles: tuple[Role, ...]) -> None:
    fates = Fates(seed, roles=roles, copy_failure_rate=0.05)
    fates.run()
    fates.check(seed)


def test_in_these_worlds_front_ends_and_workers_do_die() -> None:
    fates = [Fates(seed, roles=SPLIT) for seed in range(2)]
    for fate in fates:
        fate.run()
    assert sum(fate.num_lost_fronts for fate in fates) > 2
    assert sum(fate.world.num_lost_workers for fate in fates) > 1
    assert sum(front.core.num_handoffs for fate in fates for front in fate.world.fronts) > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_seeds() -> None:
    for seed in range(1000):
        fates = Fates(seed, roles=SPLIT if seed % 2 else MIXED, copy_failure_rate=0.02)
        fates.run()
        fates.check(seed)


def test_who_comes_again_finds_what_is_cached() -> None:
    """A front end that has never seen a prompt sends it to the worker that has it."""
    world = ClusterWorld(1, num_blocks=(200,), policy="kv", kv_link="")
    (stem, *_), *_ = (seqs for seqs in requests(1) if len(seqs[0].prompt_tokens) > 64)
    world.submit((stem,))
    world.run()
    home = max(world.workers, key=lambda worker: len(worker.cached))
    world.lose_front(world.fronts[0])
    late = world.add_front()
    world.run()
    world.submit((stem,), late)
    decision = late.core.decision(stem.request_id)
    assert decision is not None
    assert decision.chosen.num_hit_blocks == (len(stem.prompt_tokens) - 1) // 16
    assert decision.chosen.name == home.name
    assert late.router.stats().num_resyncs == 0
    world.run()


@pytest.mark.parametrize("seed", range(6))
def test_what_one_front_end_has_booked_the_other_hears_of_the_worker(seed: int) -> None:
    world = ClusterWorld(seed, num_blocks=(200,), num_fronts=2, roles=MIXED[:1], policy="kv")
    ours, theirs = world.fronts
    for seqs in requests(0):
        world.submit(seqs, theirs)
    (busy,) = world.workers
    while busy.core.stats().num_waiting + busy.core.stats().num_running < 8:
        world.advance()
    world.add_worker(Role.MIXED)
    for line in busy.lines:
        stats = busy.core.stats()
        load = WorkerLoad.of(stats, stats.full_step_ns)
        num_received = 0 if line.front is ours else None
        world.handle(WorkerStats(line.worker_id, load, num_received), line.front)
    world.submit(requests(1)[0], ours)
    decision = ours.core.decision("r0")
    assert decision is not None
    assert decision.chosen.name == "w1"
    (other,) = decision.candidates[1:]
    assert (other.name, decision.num_tied) == ("w0", 1)
    assert other.total_ms > decision.chosen.total_ms
    world.run()
