"""Front ends give workers up that live on, and come again: what these say late counts for nothing,
nobody's request is lost, and nothing stays held (F05, F14). Their clocks are hours apart (F15).
"""

from collections.abc import Iterable
from random import Random

import msgspec
import pytest

from headrace.core.base.events import Reject
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns
from headrace.core.base.worker import Role
from sim.test_lost_workers import SPLIT, check_outputs, requests
from support.cluster_world import ClusterWorld
from support.fake_device import expected_output
from support.seeds import FEW_AND_A_THOUSAND
from support.world_turns import Away, turns

MIXED = (Role.MIXED,) * 3
TWO_HOURS_NS = 7200 * NS_PER_S
A_DAY_NS = 86_400 * NS_PER_S
SOON_NS = 300 * NS_PER_MS  # half of what such a world takes


class CutLinks:
    """A world whose only front end loses workers that live on, for a while."""

    def __init__(self, seed: int, **settings: object) -> None:
        self.rng = Random(seed)
        self.world = ClusterWorld(seed, **settings)  # type: ignore[arg-type]
        self.num_cuts = 0

    def run(self, asked: Iterable[tuple[SeqSpec, ...]]) -> None:
        world, rng = self.world, self.rng
        away = Away(world, rng)
        for _ in turns(world, rng, asked):
            if rng.random() < 0.01:
                self.num_cuts += away.send(rng.choice(world.workers))
            for _ in away.come_back(0.02):
                pass
        world.run()
        away.all_come_back()
        world.run()


@pytest.mark.parametrize("roles", [MIXED, SPLIT], ids=["mixed", "split"])
@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_who_was_given_up_and_lives_harms_nobody(seeds: range, roles: tuple[Role, ...]) -> None:
    num_cuts = num_migrations = 0
    for seed in seeds:
        fates = CutLinks(seed, roles=roles, copy_failure_rate=0.05, most_clock_ns=TWO_HOURS_NS)
        fates.run(requests(seed % 10))
        check_outputs(fates.world, seed)
        num_cuts += fates.num_cuts
        num_migrations += fates.world.front.num_migrations
        assert all(len(worker.lines) == 1 for worker in fates.world.workers)
    assert num_cuts > 2 * len(seeds)
    assert num_migrations > len(seeds)


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_no_deadline_comes_early_or_late_by_anothers_clock(seeds: range) -> None:
    """Some have less time than clocks are apart, and some have more."""
    num_late = 0
    for seed in seeds:
        rng = Random(seed)
        fates = CutLinks(seed, roles=SPLIT, most_clock_ns=TWO_HOURS_NS)
        asked = [with_deadline(rng, seqs) for seqs in requests(seed % 10)]
        fates.run(asked)
        front = fates.world.fronts[0]
        for spec in (spec for seqs in asked for spec in seqs):
            end, got = front.ends[spec.seq_id], tuple(front.outputs.get(spec.seq_id, ()))
            if isinstance(end, Reject) or end.reason is not FinishReason.LENGTH:
                num_late += 1
                assert spec.deadline_ns == SOON_NS <= front.ended_ns[spec.seq_id]
                if isinstance(end, Reject):
                    assert (end.code, got) == ("deadline_exceeded", ())
                else:
                    assert end.reason is FinishReason.DEADLINE
                assert got == expected_output(spec)[: len(got)]
            else:
                assert got == expected_output(spec)
        fates.world.audit()
    assert num_late >= len(seeds)


def with_deadline(rng: Random, seqs: tuple[SeqSpec, ...]) -> tuple[SeqSpec, ...]:
    deadline_ns = Ns(rng.choice((SOON_NS, A_DAY_NS)))
    return tuple(msgspec.structs.replace(spec, deadline_ns=deadline_ns) for spec in seqs)
