"""Many steps at once end where one by one would have: same decisions, same blocks, same records."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import SchedulerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.router.events import WorkerKv, WorkerStats
from headrace.core.router.front import Forward, FrontEffect, FrontEvent
from headrace.core.telemetry import RequestRecord, TimeParts
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.source import Listed
from headrace.core.workload.synthetic import Synthetic, SyntheticSource
from headrace.sim.cluster import Cluster, ClusterReport, random_deaths, simulate_cluster
from headrace.sim.setup import Device, Layout, build_cluster

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
    blocks: list[Any] = field(default_factory=list)
    loads: list[Any] = field(default_factory=list)
    report: ClusterReport = field(init=False)

    def news(self) -> list[Any]:
        """Loads that are not those that the worker has told before."""
        last: dict[Any, Any] = {}
        found = []
        for now, event in self.loads:
            if last.get(event.worker_id) != event:
                last[event.worker_id] = event
                found.append((now, event))
        return found

    def observe(self, now: Ns, event: FrontEvent, effects: Sequence[FrontEffect]) -> None:
        if isinstance(event, WorkerKv):
            self.blocks.append((now, event))
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
    source = SyntheticSource(
        Synthetic(
            profile=PROFILE,
            arrivals=Arrivals.steady(rate_per_s),
            num_requests=30,
            max_tokens=2048,
            seed=seed,
        )
    )
    made = build_cluster(device, layout or Layout(mixed=2), source, seed=seed)
    pools = tuple(
        replace(
            pool, config=replace(pool.config, scheduler=overlapped(pool.config.scheduler, overlap))
        )
        for pool in made.pools
    )
    return replace(made, pools=pools, front=ClusterConfig(handoff="always"))


def overlapped(config: SchedulerConfig, overlap: str) -> SchedulerConfig:
    return replace(config, overlap=overlap)


CASES: dict[str, dict[str, Any]] = {
    "idle": {"rate_per_s": 2.0},
    "busy": {"rate_per_s": 60.0},
    "one step planned ahead": {"overlap": "on"},
    "none planned ahead": {"overlap": "off"},
    "steps of about 20 ms": {"factor": 0.6, "rate_per_s": 3.0},
    "no room": {"num_blocks": 60, "rate_per_s": 60.0},
    "small blocks": {"block_size": 4},
    "large blocks": {"block_size": 64},
    "handed over": {"layout": Layout(prefill=1, decode=2)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_gliding_decides_as_stepping_does(name: str, seed: int) -> None:
    """A Source is used up, so each run has its own."""
    stepping = run(replace(cluster(**CASES[name], seed=seed), glides=False))
    gliding = run(replace(cluster(**CASES[name], seed=seed), is_checked=name == "busy"))
    assert gliding.sent == stepping.sent
    assert gliding.blocks == stepping.blocks
    assert gliding.news() == stepping.news()
    assert gliding.report.trace_hash == stepping.report.trace_hash
    assert gliding.report.workers == stepping.report.workers
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


def spec(number: int, *, at_s: float) -> SeqSpec:
    return SeqSpec(
        seq_id=SeqId(number),
        request_id=str(number),
        prompt_tokens=tuple(range(100)),
        params=SamplingParams(max_tokens=40, ignore_eos=True),
        arrived_ns=Ns(round(at_s * NS_PER_S)),
    )


def test_few_steps_are_looked_at() -> None:
    calls = [0, 0]
    for index, glides in enumerate((False, True)):

        def count(*_: object, index: int = index) -> None:
            calls[index] += 1

        made = replace(cluster(rate_per_s=2.0), glides=glides)
        simulate_cluster(made, observe_plan=count)
    assert calls[1] < calls[0] / 4
