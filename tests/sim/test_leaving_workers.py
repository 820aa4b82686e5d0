"""Workers that are asked to leave, that nobody may take over from, and that all die at once: what
has to come of F17, F02 and F08, over seeds.
"""

from random import Random

import pytest

from headrace.core.base.events import Finish, Reject
from headrace.core.base.request import FinishReason
from headrace.core.base.worker import Role
from headrace.core.router.events import WorkerDrain
from sim.test_lost_workers import SPLIT, check_outputs, disturbed, requests
from support.cluster_parts import Worker
from support.cluster_world import ClusterWorld
from support.fake_device import expected_output
from support.seeds import FEW_AND_A_THOUSAND
from support.world_turns import turns

pytestmark = pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)

MIXED = (Role.MIXED,) * 3


def is_empty(worker: Worker) -> bool:
    return worker.core.is_idle and not any(line.to_worker or line.to_front for line in worker.lines)


@pytest.mark.parametrize("roles", [MIXED, SPLIT], ids=["mixed", "split"])
def test_who_is_asked_to_leave_ends_its_streams_first(
    seeds: range, roles: tuple[Role, ...]
) -> None:
    """One after another, each as soon as it has nothing left; another one takes its place then."""
    num_left = num_busy = 0
    for seed in seeds:
        rng, world = Random(seed), ClusterWorld(seed, roles=roles)
        leaving: Worker | None = None
        for _ in turns(world, rng, requests(seed % 10)):
            if leaving is None and rng.random() < 0.02:
                leaving = rng.choice(world.workers)
                world.handle(WorkerDrain(leaving.lines[0].worker_id), world.fronts[0])
                num_busy += not is_empty(leaving)
            elif leaving is not None and is_empty(leaving):
                role = leaving.role
                world.lose_worker(leaving)
                world.add_worker(role)
                leaving = None
                num_left += 1
        world.run()
        assert world.front.num_migrations == 0, seed
        check_outputs(world, seed)
    assert num_left >= len(seeds)
    assert num_busy >= len(seeds)


def check_all(world: ClusterWorld, seed: int, error: str) -> int:
    """Every sequence has ended once: whole or, as many as this returns, with this error."""
    front, num_errors = world.fronts[0], 0
    for spec in (spec for seqs in requests(seed % 10) for spec in seqs):
        tokens, end = expected_output(spec), front.ends[spec.seq_id]
        got = tuple(front.outputs.get(spec.seq_id, ()))
        assert got == tokens[: len(got)]
        match end:
            case Finish(reason=FinishReason.ERROR, error=text):
                assert error in text
                num_errors += 1
            case Finish(reason=FinishReason.CANCELLED):
                assert spec.seq_id in front.is_cancelled
            case Finish(reason=reason):
                assert (reason, got) == (FinishReason.LENGTH, tokens)
            case Reject(status_hint=status):
                assert (status, got) in ((429, ()), (503, ()))
    world.audit()
    return num_errors


def test_without_migration_a_stream_ends_once_with_what_it_had(seeds: range) -> None:
    num_errors = 0
    for seed in seeds:
        roles = SPLIT if seed % 2 else MIXED
        world = disturbed(seed, roles=roles, max_migrations=0)
        num_errors += check_all(world, seed, "was lost: killed")
        assert world.front.num_migrations == 0
    assert num_errors > len(seeds)


def test_all_of_a_role_die_at_once_and_come_back(seeds: range) -> None:
    """The others do what they can do alone. Where nobody is left that decodes, requests wait for as
    long as they may.
    """
    num_deaths = num_late = num_refused = 0
    for seed in seeds:
        rng, world = Random(seed), ClusterWorld(seed, roles=SPLIT)
        # Some come back at once, and some after longer than anybody waits.
        chance = 0.7 if seed % 8 else 0.05
        for _ in turns(world, rng, requests(seed % 10)):
            missing = world.missing_roles
            if not missing and rng.random() < 0.01:
                dying = rng.choice(((Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE)))
                for worker in [one for one in world.workers if one.role in dying]:
                    world.lose_worker(worker)
                num_deaths += 1
            elif missing and rng.random() < (0.05 if world.can_decode else chance):
                for role in missing:
                    world.add_worker(role)
        world.run()
        num_late += check_all(world, seed, "no worker came up within 10 s")
        num_refused += sum(isinstance(end, Reject) for end in world.ends.values())
    assert num_deaths > 2 * len(seeds)
    assert min(num_late, num_refused) > 0 or len(seeds) < 100
