"""Workers stop in hand-offs, and wake, or do not: whatever was handed over there goes on elsewhere
within a second, with the same bytes, and nothing stays held (F03, F05).

Workers beat every 250 ms of the world's time, copies out of a worker that has stopped end by
themselves, and the front end's own `Stalls` says who has.
"""

from collections.abc import Iterable
from random import Random

import pytest

from headrace.core.base.events import Timer
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.router.stalls import Stalls
from sim.test_lost_workers import SPLIT, check_outputs, holds, requests, streaming
from support.cluster_parts import Worker
from support.cluster_world import ClusterWorld
from support.fake_device import expected_output
from support.seeds import FEW_AND_A_THOUSAND
from support.world_turns import turns

BEAT_NS = 250 * NS_PER_MS
NAP_NS = 5 * NS_PER_MS


class Stops:
    """A world whose only front end looks for workers that have stopped."""

    def __init__(self, seed: int, world: ClusterWorld) -> None:
        self.rng = Random(seed)
        self.world = world
        self.front = world.fronts[0]
        self.stalls = Stalls(round(ClusterConfig().stall_timeout_s * NS_PER_S))
        self.num_stops = 0
        self.slowest_ns = 0  # from a stop until nothing was handed over there any more
        self._heard_ns: dict[WorkerId, Ns] = {}
        self._calm_ns = Ns(0)  # when somebody woke, or nobody decoded, last

    def run(self, asked: Iterable[tuple[SeqSpec, ...]]) -> None:
        world, rng = self.world, self.rng
        for _ in turns(world, rng, asked, share=0.02, step=self.step):
            if rng.random() < 0.01:
                self.stop(rng.choice(world.workers))
            for worker in list(world.stopped_ns):
                if rng.random() < 0.001:
                    self.wake(worker)
                elif rng.random() < 0.0003:
                    world.lose_worker(worker)
                    world.add_worker(worker.role)
            if not self._decoders:
                self.wake(rng.choice([one for one in world.workers if one.role is Role.DECODE]))
        for worker in list(world.stopped_ns):
            self.wake(worker)
        for _ in range(200):
            self.step()
        world.run()

    def stop(self, worker: Worker) -> None:
        if worker not in self.world.stopped_ns:
            self.num_stops += 1
            self.world.stop(worker)

    def wake(self, worker: Worker) -> None:
        self.world.wake(worker)
        self._calm_ns = self.world.now

    def step(self) -> None:
        world = self.world
        if not world.act():
            world.now = Ns(world.now + NAP_NS)
        for at_ns, timer_id in sorted(self.front.timers):
            if at_ns <= world.now:
                self.front.timers.remove((at_ns, timer_id))
                world.handle(Timer(timer_id), self.front)
        heard_ns: dict[WorkerId, Ns] = {}
        for worker in world.workers:
            worker_id = worker.lines[0].worker_id
            last_ns = self._heard_ns.get(worker_id, world.now)
            beats = worker not in world.stopped_ns and world.now - last_ns >= BEAT_NS
            heard_ns[worker_id] = world.now if beats else last_ns
        self._heard_ns = heard_ns
        for event in self.stalls.turn(world.now, heard_ns):
            world.handle(event, self.front)
        self._check()

    @property
    def _decoders(self) -> list[Worker]:
        stopped = self.world.stopped_ns
        return [one for one in self.world.workers if one.role is Role.DECODE and one not in stopped]

    def _check(self) -> None:
        """A second after it has stopped, nobody waits for it who need not."""
        if not self._decoders:
            self._calm_ns = self.world.now
        for worker, stopped_ns in self.world.stopped_ns.items():
            late_ns = self.world.now - max(stopped_ns, self._calm_ns)
            worker_id = worker.lines[0].worker_id
            flights = self.front.core._flights.values()
            if any(one.worker_id == worker_id and one.is_handed_over for one in flights):
                self.slowest_ns = max(self.slowest_ns, late_ns)
                assert late_ns <= NS_PER_S


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_who_stops_in_a_hand_off_costs_a_second_at_most(seeds: range) -> None:
    num_stops = num_recalls = slowest_ns = 0
    for seed in seeds:
        world = ClusterWorld(
            seed, roles=SPLIT, copy_failure_rate=0.02, step_tokens=16 if seed % 2 else 64
        )
        stops = Stops(seed, world)
        stops.run(requests(seed % 10))
        check_outputs(world, seed)
        num_stops += stops.num_stops
        num_recalls += world.front.num_recalls
        slowest_ns = max(slowest_ns, stops.slowest_ns)
    assert num_stops > 2 * len(seeds)
    assert num_recalls > len(seeds)
    assert slowest_ns > 700 * NS_PER_MS  # that is what is measured


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_what_had_come_of_a_prompt_is_not_computed_again(seeds: range) -> None:
    """Its worker never wakes, and nobody takes it for lost."""
    num_recalls = 0
    for seed in seeds:
        world, spec = streaming(seed)
        stops = Stops(seed, world)
        for _ in range(seed % 13):
            stops.step()
        stops.stop(
            next(w for w in world.workers if w.role is Role.PREFILL and w.core.stats().num_steps)
        )
        while spec.seq_id in world.living:
            stops.step()
        assert tuple(world.outputs[spec.seq_id]) == expected_output(spec)
        num_tokens = len(spec.prompt_tokens) + spec.params.max_tokens
        assert num_computed(world, Role.DECODE) <= num_tokens - 16 * world.num_copied_blocks
        num_recalls += world.front.num_recalls
    assert num_recalls > len(seeds) / 3


def num_computed(world: ClusterWorld, role: Role) -> int:
    workers = (worker for worker in world.workers if worker.role is role)
    return sum(worker.core.stats().num_computed_tokens for worker in workers)


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_who_stops_when_it_has_taken_over_costs_a_second(seeds: range) -> None:
    """It has all of the KV, and has not made a token. What was copied from is cached still."""
    num_recalls = slowest_ns = 0
    for seed in seeds:
        world, spec = streaming(seed)
        stops = Stops(seed, world)
        while not (there := [worker for worker in world.workers if has_taken_over(worker)]):
            stops.step()
        stops.stop(there[0])
        num_tokens = len(world.outputs[spec.seq_id])
        while len(world.outputs[spec.seq_id]) == num_tokens:
            stops.step()
            slowest_ns = max(slowest_ns, world.now - world.stopped_ns[there[0]])
            assert slowest_ns < 1.2 * NS_PER_S  # with the steps that the other one needs
        while spec.seq_id in world.living:
            stops.step()
        assert tuple(world.outputs[spec.seq_id]) == expected_output(spec)
        num_recalls += world.front.num_recalls
        stops.wake(there[0])
        for _ in range(200):
            stops.step()
        world.audit()
    assert num_recalls > len(seeds) / 2
    assert slowest_ns > 700 * NS_PER_MS  # that is what is measured


def has_taken_over(worker: Worker) -> bool:
    return worker.role is Role.DECODE and worker.core.stats().num_running > 0


@pytest.mark.parametrize("seed", range(5))
def test_nor_does_anybody_wait_for_a_decoder_that_stops(seed: int) -> None:
    """It was told what to expect, and gets nothing more to do."""
    world, spec = streaming(seed)
    stops = Stops(seed, world)
    (there,) = [worker for worker in world.workers if holds(worker)]
    stops.stop(there)
    while spec.seq_id in world.living:
        stops.step()
    assert tuple(world.outputs[spec.seq_id]) == expected_output(spec)
    assert world.now < 2 * NS_PER_S
    (other,) = [one for one in world.workers if one.role is Role.DECODE and one is not there]
    assert other.core.stats().num_computed_tokens > 0
    stops.wake(there)
    for _ in range(200):
        stops.step()
    world.audit()
