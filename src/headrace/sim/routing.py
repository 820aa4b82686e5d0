"""The policies of the production router on the same requests, workers and links.

Decides nothing: the router does, under the simulator's clock.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from headrace.sim.fleet_trial import Fleet, Interval, Measured, Traffic, run_fleet
from headrace.sim.progress import Watching, unwatched
from headrace.sim.summary import Summary


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy comes to. Figures without an interval are means over the seeds."""

    policy: str
    hit_rate: Interval  # share of prompt tokens that were found in caches
    ttft_mean_ms: Interval
    ttft_to_best: float  # mean TTFT over the least of all policies
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    attainment: Interval
    goodput_per_s: float
    load_per_s: float
    imbalance: float  # tokens computed by the worker that had most, over the mean


def compare_policies(
    fleet: Fleet,
    traffic: Traffic,
    seeds: Sequence[int],
    policies: Sequence[str],
    say: Callable[[str], None] = lambda _: None,
    watching: Watching = unwatched,
) -> list[PolicyRow]:
    """In the order of the policies. All meet the same requests, seed by seed."""
    measured = []
    for policy in policies:
        own = msgspec.structs.replace(fleet, policy=policy)
        runs = [run_fleet(own, traffic, seed, watching=watching) for seed in seeds]
        whole = tuple(run for run in runs if isinstance(run, Summary))
        measured.append(Measured(fleet=own, runs=whole))
        say(f"{own}: {measured[-1].attainment.mean:.1%} good")
    least = min(_ttft(one).mean for one in measured)
    return [_row(one, least) for one in measured]


def _row(one: Measured, least_ttft_ms: float) -> PolicyRow:
    runs, ttft = one.runs, _ttft(one)
    return PolicyRow(
        policy=one.fleet.policy,
        hit_rate=Interval.of([run.hit_rate for run in runs]),
        ttft_mean_ms=ttft,
        ttft_to_best=ttft.mean / least_ttft_ms if least_ttft_ms else 1.0,
        ttft_p50_ms=fmean(run.ttft_ms.p50 or 0.0 for run in runs),
        ttft_p99_ms=fmean(run.ttft_ms.p99 or 0.0 for run in runs),
        tpot_p50_ms=fmean(run.tpot_ms.p50 or 0.0 for run in runs),
        tpot_p99_ms=fmean(run.tpot_ms.p99 or 0.0 for run in runs),
        attainment=one.attainment,
        goodput_per_s=fmean(run.goodput_per_s for run in runs),
        load_per_s=fmean(run.load_per_s for run in runs),
        imbalance=fmean(run.roles[0].imbalance for run in runs),
    )


def _ttft(one: Measured) -> Interval:
    return Interval.of([run.ttft_ms.mean or 0.0 for run in one.runs])
