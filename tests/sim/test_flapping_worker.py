"""F10 over seeds: a worker that dies every two seconds is cut off, gets little, and is trusted
again when it lives.
"""

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from headrace.bench.routing import Traffic, cluster_of
from headrace.core.base.types import NS_PER_S, Ns
from headrace.sim.cluster import Cluster, Death
from support.fates import Fates, fates_of
from support.seeds import FEW_AND_A_THOUSAND

NUM_DEATHS, FIRST_S, EVERY_S, DOWN_S = 8, 1.5, 2.0, 0.5
CUT_OFF_S = FIRST_S + 2 * EVERY_S  # by its third death
WELL_S = FIRST_S + (NUM_DEATHS - 1) * EVERY_S + DOWN_S  # from its last death on
# It is cut off for 5 and then for 10 s, or once more for 20 s if its last death meets a probe.
TRUSTED_S = WELL_S + 22.0


def cluster(seed: int, policy: str) -> Cluster:
    traffic = Traffic(
        num_requests=300,
        rate_per_s=6.0,
        num_prompt_tokens=64,
        shared=0.0,  # where others have the prefixes, nobody asks it at all
        num_output_tokens=8,
        seed=seed,
    )
    return replace(cluster_of(traffic, policy, num_workers=3), seed=seed, is_checked=seed < 3)


def deaths(seed: int) -> tuple[Death, ...]:
    """Of worker 0, a little sooner or later."""
    rng = Random(seed)
    times_s = (FIRST_S + EVERY_S * number + 0.3 * rng.random() for number in range(NUM_DEATHS))
    return tuple((0, ns(at_s), ns(at_s + DOWN_S)) for at_s in times_s)


def ns(seconds: float) -> Ns:
    return Ns(round(seconds * NS_PER_S))


def share(fates: Fates, begin_s: float, end_s: float) -> float:
    """Of what came in that time, what worker 0 had at any time."""
    records = fates.report.records
    came = [one.seq_id for one in records if ns(begin_s) <= one.arrived_ns < ns(end_s)]
    return sum("worker-0" in fates.places[seq_id] for seq_id in came) / len(came)


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_a_flapping_worker_is_cut_off_and_trusted_again(seeds: range) -> None:
    shares = []
    for seed in seeds:
        policy = ("kv", "round_robin", "least_loaded")[seed % 3]
        made = cluster(seed, policy)
        fates = fates_of(replace(made, deaths=deaths(seed)))
        assert not fates.rejects
        assert fates.tokens == fates_of(made).tokens, seed
        shares.append(share(fates, CUT_OFF_S + 0.5, WELL_S))
        # Trusted after a probe, it gets its part until it dies: many, where many come then.
        assert shares[-1] < 1 / 6, seed
        assert share(fates, TRUSTED_S, 1e6) > 0.2, seed
        assert fates.report.router.num_open_breakers == 0
    assert fmean(shares) < 0.1
