"""Many steps at once end where one by one would have: same decisions, same blocks, same records."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec
import pytest

from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId, WorkerId
from headrace.core.config.cluster import ClusterConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.router.events import WorkerKv, WorkerStats
from headrace.core.router.front_events import Forward, FrontEffect, FrontEvent
from headrace.core.telemetry import RequestRecord, TimeParts
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.source import Listed, Source
from headrace.core.workload.synthetic import Synthetic, SyntheticSource
from headrace.sim.cluster import Cluster, ClusterReport, random_deaths, simulate_cluster
from headrace.sim.setup import VOCAB, Device, Layout, build_cluster
from headrace.sim.steps import ListedSteps

PROFILE = WorkloadProfile(
    name="small", purpose="", prompt_tokens=150, output_tokens=60, turns=2, pause_s=1.0
)


def fast(factor: float) -> FittedCostModel:
    """So many times as fast as a laptop."""
    slow = FittedCostModel.prior()
    return FittedCostModel(
        name="fast",
        knot_ns=tuple(cost / factor for cost in slow.knot_ns),
        seq_ns=slow.seq_ns / factor,
        logit_row_ns=slow.logit_row_ns / factor,
        attention_pair_ns=slow.attention_pair_ns / factor,
        kv_token_ns=slow.kv_token_ns / factor,
    )


@dataclass
class Seen:
    """All that is decided, and all that the front end hears of blocks and loads."""

    sent: list[Any] = field(default_factory=list)
    blocks: dict[WorkerId, list[Any]] = field(default_factory=dict)  # changes, in order
    loads: list[Any] = field(default_factory=list)
    report: ClusterReport = field(init=False)

    def observe(self, now: Ns, event: FrontEvent, effects: Sequence[FrontEffect]) -> None:
        if isinstance(event, WorkerKv):
            self.blocks.setdefault(event.worker_id, []).extend(event.changes)
        if isinstance(event, WorkerStats):
            self.loads.append((now, event))
        self.sent += [(now, effect) for effect in effects if isinstance(effect, Forward)]


def run(cluster: Cluster) -> Seen:
    seen = Seen()
    seen.report = simulate_cluster(cluster, observe=seen.observe)
    return seen


def without_parts(record: RequestRecord) -> RequestRecord:
    return msgspec.structs.replace(
        record, time=TimeParts(), ttft_time=None, worst_gap_time=None, misses=()
    )


def cluster(
    *,
    rate_per_s: float = 20.0,
    factor: float = 8.0,
    num_blocks: int = 400,
    overlap: str = "auto",
    layout: Layout | None = None,
    block_size: int = 16,
    scheduler: dict[str, Any] | None = None,
    source: Source | None = None,
    num_requests: int = 30,
    seed: int = 0,
) -> Cluster:
    cost = fast(factor)
    device = Device(
        cost=cost,
        believed=cost,
        num_blocks=num_blocks * 16 // block_size,
        block_size=block_size,
        kv_block_bytes=1 << 16,
        max_model_len=2048,
    )
    source = source or SyntheticSource(
        Synthetic(
            profile=PROFILE,
            arrivals=Arrivals.steady(rate_per_s),
            num_requests=num_requests,
            max_tokens=2048,
            seed=seed,
        )
    )
    made = build_cluster(device, layout or Layout(mixed=2), source, seed=seed)
    pools = tuple(
        replace(
            pool,
            config=replace(
                pool.config,
                scheduler=replace(pool.config.scheduler, overlap=overlap, **(scheduler or {})),
            ),
        )
        for pool in made.pools
    )
    return replace(made, pools=pools, front=ClusterConfig(handoff="always"))


CASES: dict[str, dict[str, Any]] = {
    "idle": {"rate_per_s": 2.0},
    "busy": {"rate_per_s": 60.0, "num_requests": 60},
    "one step planned ahead": {"overlap": "on"},
    "none planned ahead": {"overlap": "off"},
    "steps of about 20 ms": {"factor": 0.6, "rate_per_s": 3.0},
    "no room": {"num_blocks": 60, "rate_per_s": 60.0},
    "small blocks": {"block_size": 4},
    "large blocks": {"block_size": 64},
    "handed over": {"layout": Layout(prefill=1, decode=2)},
    "small chunks": {"layout": Layout(mixed=1, step_tokens=48), "rate_per_s": 60.0},
    "prompts by turns": {
        "layout": Layout(mixed=1, step_tokens=48, budget="fixed"),
        "rate_per_s": 60.0,
        "scheduler": {"short_prompt_tokens": 100, "short_prompt_share": 0.5},
    },
    "few at once": {"rate_per_s": 60.0, "scheduler": {"max_running_seqs": 5}},
    "promised room": {"num_blocks": 120, "scheduler": {"admission": "no_evict"}},
    "no room for prompts": {"num_blocks": 90, "rate_per_s": 60.0, "overlap": "off"},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_gliding_decides_as_stepping_does(name: str, seed: int) -> None:
    """A Source is used up, so each run has its own."""
    is_checked = name in ("busy", "small chunks")
    compare(
        replace(cluster(**CASES[name], seed=seed), glides=False),
        replace(cluster(**CASES[name], seed=seed), is_checked=is_checked),
    )


@pytest.mark.parametrize("seed", range(4))
def test_so_it_does_with_whoever_comes(seed: int) -> None:
    """Prompts of which all but one token is known, long ones, priorities, limits, deadlines, and
    whoever may stop at any token.
    """
    settings: dict[str, Any] = {"layout": Layout(mixed=1, step_tokens=64)}
    settings["scheduler"] = {"order": "priority"} if seed % 2 else {}
    made = [cluster(source=Listed(mixed_specs(seed)), **settings) for _ in range(2)]
    compare(replace(made[0], glides=False), replace(made[1], is_checked=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 24))
def test_so_it_does_over_more_seeds(seed: int) -> None:
    test_so_it_does_with_whoever_comes(seed)


def mixed_specs(seed: int) -> list[SeqSpec]:
    rng = Random(seed)
    at_s, specs = 0.0, []
    for number in range(40):
        at_s += rng.expovariate(20.0)
        one = spec(number, at_s=at_s)
        first, num_prompt = rng.choice((0, 0, number)), rng.choice((33, 33, 32, 100, 400))
        params = SamplingParams(max_tokens=rng.choice((1, 2, 90, 300)), ignore_eos=True)
        if rng.random() < 0.1:
            params = msgspec.structs.replace(params, stop_token_ids=(1, 2, 3))
        specs.append(
            msgspec.structs.replace(
                one,
                prompt_tokens=tuple(range(first, first + num_prompt)),
                params=params,
                priority=rng.randrange(3),
                slo=Slo(itl_ms=rng.choice((None, 5.0, 80.0))),
                deadline_ns=Ns(one.arrived_ns + 300_000_000) if rng.random() < 0.1 else None,
            )
        )
    return specs


def compare(stepped: Cluster, glided: Cluster) -> None:
    stepping, gliding = run(stepped), run(glided)
    assert gliding.sent == stepping.sent
    assert gliding.blocks == stepping.blocks
    assert set(gliding.loads) <= set(stepping.loads)
    assert gliding.report.trace_hash == stepping.report.trace_hash
    assert gliding.report.workers == stepping.report.workers
    assert gliding.report.router.num_hit_blocks == stepping.report.router.num_hit_blocks
    assert gliding.report.num_events <= stepping.report.num_events
    pairs = zip(gliding.report.records, stepping.report.records, strict=True)
    for one, other in pairs:
        assert without_parts(one) == without_parts(other)
        assert one.time.total_ns == one.e2e_ns
        mine, its = (msgspec.structs.astuple(record.time) for record in (one, other))
        assert mine == pytest.approx(its, abs=0.002 * one.e2e_ns)


@pytest.mark.parametrize("seed", [1, 2])
def test_so_it_does_when_workers_die(seed: int) -> None:
    deaths = random_deaths(3, mean_life_s=1.0, start_up_s=0.3, until_s=4.0, seed=seed)
    layout = Layout(prefill=1, decode=2)
    made = [replace(cluster(layout=layout, seed=seed), deaths=deaths) for _ in range(2)]
    stepping, gliding = run(replace(made[0], glides=False)), run(made[1])
    assert gliding.sent == stepping.sent
    assert gliding.report.trace_hash == stepping.report.trace_hash
    assert gliding.report.num_migrations == stepping.report.num_migrations > 0


@pytest.mark.parametrize("message_ms", [0.2, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_dies_takes_no_more_tokens_with_it(seed: int, message_ms: float) -> None:
    """Those that were made while words take from worker to front end, and no others."""
    deaths = random_deaths(2, mean_life_s=0.3, start_up_s=0.05, until_s=3.0, seed=seed)
    made = replace(
        cluster(rate_per_s=40.0, num_requests=60, seed=seed), deaths=deaths, message_ms=message_ms
    )
    stepping, gliding = run(replace(made, glides=False)), run(made)
    assert gliding.sent == stepping.sent
    assert gliding.report.trace_hash == stepping.report.trace_hash
    assert stepping.report.num_migrations > 5
    pairs = zip(gliding.report.records, stepping.report.records, strict=True)
    for one, other in pairs:
        assert without_parts(one) == without_parts(other)


def test_nobody_tells_the_same_load_for_ever() -> None:
    made = replace(cluster(), source=Listed([spec(0, at_s=0.0), spec(1, at_s=600.0)]))
    seen = run(made)
    times_s = [now / NS_PER_S for now, _ in seen.loads]
    assert len(times_s) < 100
    # Whoever comes finds loads that are as old as ever.
    assert sum(599.8 < at_s < 600.0 for at_s in times_s) >= 2
    stepping = run(
        replace(made, source=Listed([spec(0, at_s=0.0), spec(1, at_s=600.0)]), glides=False)
    )
    assert len(stepping.loads) > 10_000
    assert seen.report.trace_hash == stepping.report.trace_hash


def spec(number: int, *, at_s: float, max_tokens: int = 40) -> SeqSpec:
    return SeqSpec(
        seq_id=SeqId(number),
        request_id=str(number),
        prompt_tokens=tuple(range(100)),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrived_ns=Ns(round(at_s * NS_PER_S)),
    )


@pytest.mark.parametrize(("rate_per_s", "share"), [(2.0, 0.1), (60.0, 0.1)])
def test_few_steps_are_decided_one_by_one(rate_per_s: float, share: float) -> None:
    calls = [0, 0]
    for index, glides in enumerate((False, True)):

        def count(*_: object, index: int = index) -> None:
            calls[index] += 1

        made = replace(cluster(rate_per_s=rate_per_s), glides=glides)
        simulate_cluster(made, observe_plan=count)
    assert calls[1] < share * calls[0]


@pytest.mark.parametrize("num_blocks", [400, 36])
def test_whoever_goes_on_from_what_another_has_just_sampled_finds_it(num_blocks: int) -> None:
    """The router hears of these blocks, and of what was evicted for them, when it is asked."""
    tokens = ListedSteps(fast(1.0), VOCAB).tokens
    specs = [spec(0, at_s=0.0, max_tokens=300), spec(1, at_s=0.1, max_tokens=200)]
    for number, at_s in enumerate((0.4, 0.6, 0.8), start=2):
        of = number % 2
        prompt = (*specs[of].prompt_tokens, *tokens(SeqId(of), 100, 130 + 10 * number))
        one = spec(number, at_s=at_s, max_tokens=50)
        specs.append(msgspec.structs.replace(one, prompt_tokens=prompt))
    made = [cluster(source=Listed(specs), num_blocks=num_blocks, factor=1.0) for _ in range(2)]
    compare(replace(made[0], glides=False), made[1])
    if num_blocks == 400:
        records = run(replace(made[1], source=Listed(specs))).report.records
        cached = {record.seq_id: record.num_cached_tokens for record in records}
        assert all(cached[SeqId(number)] > 100 for number in (2, 3, 4))
