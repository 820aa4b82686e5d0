"""Recorded traffic, served again: by the workers that were recorded, or by others.

Decides what stands for what was recorded; refuses to decide anything that production decides.
"""

from dataclasses import replace
from typing import Final

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S
from headrace.core.base.worker import Role
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import RouterConfig, SchedulerConfig
from headrace.core.cost.calibration import Calibration, Host
from headrace.core.cost.fitted import FittedCostModel, Link
from headrace.core.telemetry import RequestRecord
from headrace.core.telemetry.fold import merge_slo
from headrace.core.workload.recording import PoolFacts, Recording
from headrace.sim.cluster import KV_LINK, Cluster, simulate_cluster
from headrace.sim.outcomes import Outcomes
from headrace.sim.pool import EVEN, Pool
from headrace.sim.progress import Seen, unseen
from headrace.sim.tiers import Tier
from headrace.sim.traffic import VOCAB, RecordedSource
from headrace.sim.watched import WatchedCost

MEMORY_LINK: Final = "memory"  # between workers of one machine, as cost models call it
DISK_LINK: Final = "disk"
DAY_S: Final = 86400.0
MAX_SPAN_S: Final = 31 * DAY_S  # workers tell their load each tenth of a second, busy or not
MESSAGE_MS: Final = 0.2  # from front end to worker, and back


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be otherwise than it was recorded. None = as it was. Where a number of workers is
    given, there are no others than those that are given.
    """

    workers: int | None = None
    prefill: int | None = None
    decode: int | None = None
    policy: str | None = None
    handoff: str | None = None
    kv_blocks: int | None = None
    kv_link_gb_s: float | None = None
    kv_host_bytes: int | None = None  # below each worker's device
    kv_host_gb_s: float | None = None
    kv_disk_bytes: int | None = None
    kv_disk_gb_s: float | None = None
    max_running_seqs: int | None = None
    step_tokens: int | None = None
    itl_target_ms: float | None = None
    order: str | None = None
    budget: str | None = None
    admission: str | None = None

    @property
    def num_by_role(self) -> dict[Role, int] | None:
        given = (self.workers, self.prefill, self.decode)
        if given == (None, None, None):
            return None
        return dict(
            zip((Role.MIXED, Role.PREFILL, Role.DECODE), (n or 0 for n in given), strict=True)
        )


UNCHANGED: Final = Changes()


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve a recording. `slo` replaces limits for requests that state none."""

    changes: Changes = UNCHANGED
    slo: Slo = Slo()
    speed: float = 1.0
    seed: int = 0
    machine: Calibration | None = None  # that serves, instead of what the recording knows of it
    sharing: int | None = None  # workers that share such a machine; None = as it was calibrated


def default_slo(recording: Recording, trial: Trial) -> Slo:
    return merge_slo(trial.slo, recording.begin.slo)


def build_trial(recording: Recording, trial: Trial, source: RecordedSource) -> Cluster:
    """Raises ConfigError where nobody would decode, or what workers are is not in the recording."""
    begin, changes = recording.begin, trial.changes
    if (length_s := span_s(recording, trial.speed)) > MAX_SPAN_S:
        raise ConfigError(
            f"{length_s / DAY_S:,.4g} days of traffic are more than the {MAX_SPAN_S / DAY_S:g} "
            "that are simulated",
            hint="sim whatif --speed lets requests come sooner after each other",
        )
    pools = pools_of(recording, trial)
    router = begin.router
    is_alone = begin.is_alone and sum(pool.num_workers for pool in pools) == 1
    if begin.is_alone:
        router = replace(router, kv_link=MEMORY_LINK)
    router = replace(router, policy=changes.policy or router.policy, seed=router.seed + trial.seed)
    cluster = Cluster(
        pools=pools,
        source=source,
        written=source.written,
        router=router,
        front=ClusterConfig(
            handoff=changes.handoff or begin.handoff,
            handoff_ms=begin.handoff_ms,
            handoff_neighbour_weight=begin.handoff_neighbour_weight,
            max_migrations=begin.max_migrations,
        ),
        link=_link(router, pools, trial),
        default_slo=default_slo(recording, trial),
        message_ms=0.0 if is_alone else MESSAGE_MS,
        seed=trial.seed,
    )
    machine = trial.machine
    if machine is None:
        return cluster
    return replace(
        cluster,
        # Recorded times are the server's: clients are not among them.
        host=Host(request=machine.host.server),
        sharing=trial.sharing or machine.num_workers,
        slow_down=machine.slow_down,
        slow_down_large=machine.slow_down_large,
    )


def run_trial(recording: Recording, trial: Trial, seen: Seen = unseen) -> Outcomes:
    source = RecordedSource(recording, speed=trial.speed)
    cluster = build_trial(recording, trial, source)
    outcomes = Outcomes(len(recording.requests))

    def take(record: RequestRecord) -> None:
        outcomes.add(record)
        seen(record.finished_ns)

    report = simulate_cluster(cluster, on_record=take)
    outcomes.note(report)
    outcomes.beyond = {
        words
        for pool in cluster.pools
        if isinstance(pool.cost, WatchedCost)
        for words in pool.cost.beyond()
    }
    return outcomes


# ---- workers


def pools_of(recording: Recording, trial: Trial) -> tuple[Pool, ...]:
    """Those that were there at the end, when most was known of them."""
    if not recording.pools or not recording.pools[-1].pools:
        raise ConfigError(
            "the recording does not say what its workers are",
            hint="name another one whose workers stand for them: --like FILE",
        )
    facts = {pool.role: pool for pool in recording.pools[-1].pools}
    known = max(facts.values(), key=lambda pool: pool.cost.num_samples)
    numbers = trial.changes.num_by_role or {role: pool.num_workers for role, pool in facts.items()}
    if not numbers.get(Role.MIXED) and not numbers.get(Role.DECODE):
        raise ConfigError(
            "there must be workers that decode", hint="say --workers N, or --prefill and --decode"
        )
    return tuple(
        _pool(facts.get(role, known), role, number, trial)
        for role, number in numbers.items()
        if number
    )


def _pool(facts: PoolFacts, role: Role, num_workers: int, trial: Trial) -> Pool:
    spec, changes, machine = facts.spec, trial.changes, trial.machine
    num_blocks = changes.kv_blocks or spec.num_blocks
    config = replace(facts.config, scheduler=_scheduler(facts.config.scheduler, changes))
    return Pool(
        num_workers=num_workers,
        role=role,
        config=config,
        spec=msgspec.structs.replace(
            spec,
            num_blocks=num_blocks,
            max_model_len=min(spec.max_model_len, num_blocks * spec.block_size),
            vocab_size=VOCAB,
        ),
        cost=WatchedCost(facts.cost, facts.cost.largest)
        if machine is None
        else WatchedCost(machine.steps, machine.seen.largest),
        believed=facts.cost if machine is None else machine.believed,
        kv_block_bytes=facts.kv_block_bytes or int(_has_copies(machine)),
        publishes_kv=facts.config.kv.prefix_cache,
        tiers=_tiers(facts, changes),
        residuals=EVEN if machine is None else machine.residuals,
    )


def _tiers(facts: PoolFacts, changes: Changes) -> tuple[Tier, ...]:
    """Links are those that the recorded cost model knows, where nothing is said. Raises ConfigError
    where nobody knows what a block weighs.
    """
    asked = (
        ("host", MEMORY_LINK, changes.kv_host_bytes, changes.kv_host_gb_s),
        ("disk", DISK_LINK, changes.kv_disk_bytes, changes.kv_disk_gb_s),
    )
    tiers = []
    for name, link_name, num_bytes, gb_s in asked:
        if not num_bytes:
            continue
        if not facts.kv_block_bytes:
            raise ConfigError(
                f"--kv-{name} has a size in bytes, and the log does not say what a block weighs",
                hint="an event log does not, a recording (`serve --record`) does",
            )
        link = facts.cost.links.get(link_name, FittedCostModel.prior().links[link_name])
        if gb_s is not None:
            link = Link(latency_ns=link.latency_ns, byte_ns=1.0 / gb_s)
        tiers.append(Tier(name=name, num_bytes=num_bytes, link=link))
    return tuple(tiers)


def _scheduler(recorded: SchedulerConfig, changes: Changes) -> SchedulerConfig:
    asked = {
        name: value
        for name in SchedulerConfig.__dataclass_fields__
        if (value := getattr(changes, name, None)) is not None
    }
    if changes.step_tokens is not None and recorded.chunk_tokens in (0, recorded.step_tokens):
        asked["chunk_tokens"] = changes.step_tokens  # a chunk is a whole step, as it was
    return replace(recorded, **asked)


def _has_copies(machine: Calibration | None) -> bool:
    return machine is not None and machine.kv_link is not None


def _link(router: RouterConfig, pools: tuple[Pool, ...], trial: Trial) -> Link:
    gb_s, machine = trial.changes.kv_link_gb_s, trial.machine
    if gb_s is not None:
        return Link(latency_ns=KV_LINK.latency_ns, byte_ns=1.0 / gb_s)
    if machine is not None and machine.kv_link is not None:
        per_block = machine.kv_link
        return Link(
            latency_ns=per_block.latency_ns, byte_ns=per_block.byte_ns / pools[0].kv_block_bytes
        )
    return pools[0].believed.links.get(router.kv_link, KV_LINK)


def span_s(recording: Recording, speed: float = 1.0) -> float:
    """From the first arrival to the last; a single request has none, and gets a second."""
    first, last = recording.requests[0].arrived_ns, recording.requests[-1].arrived_ns
    return (last - first) / NS_PER_S / speed or 1.0
