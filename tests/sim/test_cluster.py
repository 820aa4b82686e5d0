"""Workers behind a router under one virtual clock: same seed, same trace; whatever is lost, late or
dead, every request ends once, with the tokens of an undisturbed run.
"""

from dataclasses import replace

import pytest

from headrace.bench.routing import Traffic, cluster_of, report
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig
from headrace.core.cost.fitted import FittedCostModel, Link
from headrace.sim.cluster import Cluster, random_deaths, simulate_cluster
from headrace.sim.pool import MessageFaults
from support.fates import Fates, fates_of

TRAFFIC = Traffic(
    num_requests=50, num_prompt_tokens=256, num_prefixes=6, num_output_tokens=16, rate_per_s=12
)
ALL_FAULTS = MessageFaults(
    kv_lost=0.1, kv_twice=0.1, kv_late=0.2, stats_lost=0.2, stats_nan=0.2, late_ms=500
)


def small(policy: str = "kv", **fields: object) -> Cluster:
    """Fields of the cluster, or of its workers."""
    cluster = cluster_of(TRAFFIC, policy, num_workers=3)
    (pool,) = cluster.pools
    of_pool = {name: fields.pop(name) for name in list(fields) if hasattr(pool, name)}
    pools = (replace(pool, **of_pool),)  # type: ignore[arg-type]
    return replace(cluster, **{"pools": pools, **fields})  # type: ignore[arg-type]


def tokens(fates: Fates) -> dict[SeqId, list[int]]:
    assert not fates.rejects
    return fates.tokens


def at(seconds: float) -> Ns:
    return Ns(round(seconds * NS_PER_S))


@pytest.mark.parametrize("policy", ["kv", "power_of_two"])
def test_the_same_seed_gives_the_same_trace(policy: str) -> None:
    cluster = small(policy, faults=ALL_FAULTS, deaths=((1, at(1), at(2)),))
    first, second = simulate_cluster(cluster), simulate_cluster(cluster)
    assert first.trace_hash == second.trace_hash
    other = simulate_cluster(replace(cluster, seed=5))
    assert (other.trace_hash, other.num_events) != (first.trace_hash, first.num_events)


def test_predicted_hits_are_those_that_workers_find() -> None:
    outcome = simulate_cluster(small())
    found = sum(record.num_cached_tokens for record in outcome.records)
    predicted = 16 * outcome.router.num_hit_blocks
    # Workers find parts of blocks too, and twins of which the first is not yet computed.
    assert predicted == pytest.approx(found, rel=0.1)
    assert outcome.router.num_resyncs == 0


@pytest.mark.parametrize("seed", range(2))
def test_lost_late_and_doubled_messages_cost_hits_and_nothing_else(seed: int) -> None:
    """F12 and F13."""
    undisturbed = fates_of(small(seed=seed))
    disturbed = fates_of(small(seed=seed, faults=ALL_FAULTS, is_checked=True))
    assert disturbed.report.router.num_resyncs > 0
    assert tokens(disturbed) == tokens(undisturbed)


@pytest.mark.parametrize("seed", range(2))
def test_dead_workers_cost_time_and_nothing_else(seed: int) -> None:
    """F10 for one of them: it dies every second."""
    deaths: list[tuple[int, Ns, Ns | None]] = [
        (0, at(0.5 + second), at(1.0 + second)) for second in range(4)
    ]
    deaths += [(1, at(1.7), None)]
    cluster = small(seed=seed, deaths=tuple(deaths), faults=ALL_FAULTS, is_checked=True)
    fates = fates_of(cluster)
    assert tokens(fates) == tokens(fates_of(small(seed=seed)))
    assert fates.report.num_migrations == sum(len(w) - 1 for w in fates.places.values()) > 0
    # Once its breaker is open, the flapping worker gets little.
    late = [r.seq_id for r in fates.report.records if r.arrived_ns > at(2.6)]
    on_it = [seq_id for seq_id in late if "worker-0" in fates.places[seq_id]]
    assert len(on_it) <= len(late) / 5


def test_all_dead_and_back_again() -> None:
    deaths = tuple((place, at(1), at(3)) for place in range(3))
    assert tokens(fates_of(small(deaths=deaths))) == tokens(fates_of(small()))


def test_silent_workers_are_used_when_there_are_no_others() -> None:
    faults = MessageFaults(stats_lost=1.0)
    assert tokens(fates_of(small(faults=faults))) == tokens(fates_of(small()))


def test_workers_without_events_get_nearly_the_same_hits() -> None:
    known = report(TRAFFIC, "kv", simulate_cluster(small()))
    guessed = report(TRAFFIC, "kv", simulate_cluster(small(publishes_kv=False)))
    assert guessed.hit_rate > 0.9 * known.hit_rate


def test_a_wrong_belief_about_speed_still_serves() -> None:
    """The router believes that steps take a fraction of what they take."""
    truth = FittedCostModel.prior()
    believed = FittedCostModel(
        name="too fast",
        knot_ns=tuple(cost / 10 for cost in truth.knot_ns),
        seq_ns=truth.seq_ns / 10,
        logit_row_ns=truth.logit_row_ns / 10,
        attention_pair_ns=truth.attention_pair_ns / 10,
        kv_token_ns=truth.kv_token_ns / 10,
    )
    right = report(TRAFFIC, "kv", simulate_cluster(small()))
    wrong = report(TRAFFIC, "kv", simulate_cluster(small(believed=believed)))
    assert wrong.ttft_ms.mean < 2 * right.ttft_ms.mean


def test_who_comes_too_late_is_refused_where_asked() -> None:
    traffic = Traffic(num_requests=60, num_prompt_tokens=1024, num_prefixes=8, rate_per_s=60)
    cluster = cluster_of(traffic, "kv", num_workers=2)
    router = RouterConfig(refuse_late=True)
    outcome = simulate_cluster(replace(cluster, router=router))
    served = report(traffic, "kv", outcome)
    everyone = report(traffic, "kv", simulate_cluster(cluster))
    assert served.goodput > 1.2 * everyone.goodput


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_seed_loses_a_request() -> None:
    for seed in range(1000):
        deaths = tuple((seed % 3, at(0.3 + k), at(0.8 + k)) for k in range(3))
        cluster = small(seed=seed, faults=ALL_FAULTS, deaths=deaths)
        assert tokens(fates_of(cluster)) == tokens(fates_of(small(seed=seed))), seed


def test_kv_halves_the_mean_ttft_where_prefixes_are_shared() -> None:
    """A short version of `headrace bench router`, whose figures are in docs/performance.md."""
    traffic = Traffic(num_requests=160, rate_per_s=8.0)
    by_policy = {
        policy: report(traffic, policy, simulate_cluster(cluster_of(traffic, policy)))
        for policy in ("round_robin", "least_loaded", "kv")
    }
    kv = by_policy.pop("kv")
    for other in by_policy.values():
        assert other.ttft_ms.mean > 2 * kv.ttft_ms.mean
        assert other.hit_rate < kv.hit_rate
        assert other.goodput < kv.goodput


SPLIT = ClusterConfig(handoff="always")
SLOW = Link(latency_ns=1e6, byte_ns=0.1)


def split(num_prefill: int = 1, num_decode: int = 2, **fields: object) -> Cluster:
    cluster = replace(small(), front=SPLIT, link=SLOW, **fields)  # type: ignore[arg-type]
    (pool,) = cluster.pools
    pool = replace(pool, kv_block_bytes=1 << 16)
    pools = (
        replace(pool, num_workers=num_prefill, role=Role.PREFILL),
        replace(pool, num_workers=num_decode, role=Role.DECODE),
    )
    return replace(cluster, pools=pools)


def test_prefill_workers_hand_over_what_they_computed() -> None:
    fates = fates_of(split(is_checked=True))
    assert tokens(fates) == tokens(fates_of(small()))
    assert fates.report.num_handoffs == len(fates.tokens)
    by_role = dict.fromkeys(Role, 0)
    for use in fates.report.workers:
        by_role[use.role] += use.stats.num_computed_tokens
    num_output = TRAFFIC.num_requests * TRAFFIC.num_output_tokens
    assert by_role[Role.DECODE] <= num_output + 16 * TRAFFIC.num_requests
    assert all(record.time.transfer_ns > 0 for record in fates.report.records)


@pytest.mark.parametrize("neighbour_weight", [0.1, 5.0])
def test_where_nothing_is_lost_no_copy_fails(neighbour_weight: float) -> None:
    """Nobody is asked for what is still to be computed there, or for more than it has."""
    cluster = split(1, 1)
    front = ClusterConfig(handoff="auto", handoff_neighbour_weight=neighbour_weight)
    router = replace(cluster.router, kv_link="memory")
    cluster = replace(cluster, front=front, router=router)
    report = simulate_cluster(replace(cluster, link=Link(latency_ns=1e4, byte_ns=0.1)))
    assert 0 < report.num_handoffs < TRAFFIC.num_requests
    assert [use.stats.num_failed_loads for use in report.workers] == [0, 0]


def test_a_slow_link_shows_in_the_time_between_tokens() -> None:
    fast, slow = (
        simulate_cluster(replace(split(), link=Link(latency_ns=1e6, byte_ns=byte_ns)))
        for byte_ns in (0.1, 100.0)
    )
    assert sum(r.e2e_ns for r in slow.records) > 1.2 * sum(r.e2e_ns for r in fast.records)
    assert [r.num_output_tokens for r in slow.records] == [
        r.num_output_tokens for r in fast.records
    ]


def test_kv_is_copied_while_the_rest_of_the_prompt_is_computed() -> None:
    """In shorter steps, less is left to wait for. Most prompts begin with a half that is cached."""
    waits = []
    for step_tokens in (256, 64):
        cluster = replace(split(1, 1), link=Link(latency_ns=1e4, byte_ns=10.0))
        pools = [
            replace(
                pool,
                config=replace(
                    pool.config, scheduler=replace(pool.config.scheduler, step_tokens=step_tokens)
                ),
            )
            for pool in cluster.pools
        ]
        report = simulate_cluster(replace(cluster, pools=pools))
        assert report.num_handoffs == TRAFFIC.num_requests
        waits.append(sum(record.time.transfer_ns for record in report.records))
    assert waits[1] < 0.7 * waits[0]


@pytest.mark.parametrize("seed", range(3))
def test_lost_workers_cost_no_token_of_a_hand_off(seed: int) -> None:
    deaths = random_deaths(4, mean_life_s=1.5, start_up_s=0.4, until_s=6.0, seed=seed)
    assert len(deaths) > 6
    cluster = split(2, 2, deaths=deaths, seed=seed, faults=ALL_FAULTS, is_checked=True)
    fates = fates_of(replace(cluster, link=Link(latency_ns=1e6, byte_ns=20.0)))
    assert tokens(fates) == tokens(fates_of(small(seed=seed)))
    assert fates.report.num_migrations > 0


def test_parts_of_time_add_up() -> None:
    for cluster in (small(deaths=((1, at(1), at(2)),)), split()):
        for record in simulate_cluster(cluster).records:
            assert record.time.total_ns == record.e2e_ns
