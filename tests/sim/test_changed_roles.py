"""Workers that are for something else from one moment to the next, whatever they have begun."""

from random import Random

import pytest

from headrace.core.base.worker import Role
from sim.test_leaving_workers import is_empty
from sim.test_lost_workers import SPLIT, check_outputs, check_readers, requests
from support.cluster_parts import Worker
from support.cluster_world import ClusterWorld
from support.seeds import FEW_AND_A_THOUSAND
from support.world_turns import turns

pytestmark = pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)

MIXED = (Role.MIXED,) * 3


def change(world: ClusterWorld, rng: Random) -> Worker | None:
    """Some worker has another role; None where nobody else would be left that decodes."""
    worker = rng.choice(world.workers)
    role = rng.choice([role for role in Role if role is not worker.role])
    others = [one for one in world.workers if one is not worker and one.role is not Role.PREFILL]
    if role is Role.PREFILL and not others:
        return None
    world.set_role(worker, role)
    return worker


@pytest.mark.parametrize("handoff", ["always", "auto"])
@pytest.mark.parametrize("roles", [MIXED, SPLIT], ids=["mixed", "split"])
def test_what_has_begun_ends_as_if_nothing_were(
    seeds: range, roles: tuple[Role, ...], handoff: str
) -> None:
    """No request moves for it, and what is cached stays."""
    num_busy = num_handoffs = num_kept = 0
    for seed in seeds:
        rng = Random(seed)
        step_tokens = 16 if seed % 2 else 64
        world = ClusterWorld(seed, roles=roles, handoff=handoff, step_tokens=step_tokens)
        for _ in turns(world, rng, requests(seed % 10)):
            if rng.random() < 0.02:
                before = {worker.name: len(worker.cached) for worker in world.workers}
                worker = change(world, rng)
                if worker is not None:
                    num_busy += not is_empty(worker)
                    num_kept += before[worker.name] > 0
                    assert len(worker.cached) == before[worker.name]
        world.run()
        assert world.front.num_migrations == 0, seed
        num_handoffs += world.front.num_handoffs
        check_outputs(world, seed)
    assert num_busy >= len(seeds)
    assert num_kept >= len(seeds)
    assert num_handoffs >= len(seeds) or handoff == "auto"


def test_so_it_is_for_two_front_ends_while_workers_die(seeds: range) -> None:
    """Whoever comes back has the role that it had."""
    num_changes = num_deaths = 0
    for seed in seeds:
        rng, world = Random(seed), ClusterWorld(seed, roles=SPLIT, num_fronts=2)
        waiting = [(front, seqs) for seqs in requests(seed % 10) for front in world.fronts]
        while waiting or world.num_living:
            if waiting and rng.random() < 0.05:
                front, seqs = waiting.pop(0)
                world.submit(seqs, front)
            if rng.random() < 0.02:
                num_changes += change(world, rng) is not None
            if rng.random() < 0.005:
                dead = rng.choice(world.workers)
                world.lose_worker(dead)
                world.add_worker(dead.role)
                num_deaths += 1
            world.advance()
        world.run()
        for front in world.fronts:
            check_readers(front, seed)
        world.audit()
    assert num_changes > 2 * len(seeds)
    assert num_deaths > len(seeds)
