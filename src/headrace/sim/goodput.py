"""The simulator's word on how much load keeps its limits, beside those of models of means.

The same requests (common random numbers) at each load, judged one by one; the largest load of which
at least a stated share is good. Co-located workers with whole prompts first are the production
scheduler with steps as large as a prompt; chunks are steps of their size.
"""

import msgspec

from headrace.core.base.request import Slo
from headrace.core.cost.fitted import Link
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.synthetic import Synthetic, SyntheticSource
from headrace.plan.goodput import Verdict, find_sustainable, split_candidate
from headrace.plan.queueing import CHUNKED, PREFILL_FIRST, SPLIT
from headrace.plan.service import ServiceTimes, Split
from headrace.sim.cluster import simulate_cluster
from headrace.sim.progress import Watching, unwatched
from headrace.sim.setup import VOCAB, Device, Layout, build_cluster
from headrace.sim.summary import Summary, Tally

SIMULATED = "simulator"
NOTHING_FOUND = "nothing found"
BISECTIONS = 6
FREE_LINK = Link(latency_ns=1.0, byte_ns=1e-6)  # where hand-offs take no time


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve, under the clock."""

    mode: str
    layout: Layout
    handoff: str = "never"


class Judge(msgspec.Struct, frozen=True, kw_only=True):
    """What every trial is judged by."""

    service: ServiceTimes
    slo: Slo
    device: Device
    num_requests: int = 400
    attainment: float = 0.9
    seed: int = 0
    watching: Watching = unwatched

    def summary(self, trial: Trial, load_per_s: float) -> Summary:
        service = self.service
        profile = WorkloadProfile(
            name="given",
            purpose="",
            prompt_tokens=service.prompt_tokens,
            output_tokens=service.output_tokens,
            slo=self.slo,
        )
        source = SyntheticSource(
            Synthetic(
                profile=profile,
                arrivals=Arrivals.steady(load_per_s),
                num_requests=self.num_requests,
                prompt_spread=0.0,
                output_spread=0.0,
                vocab_size=VOCAB,
                seed=self.seed,
            )
        )
        rate = service.kv_link_bytes_per_s
        cluster = build_cluster(
            self.device,
            trial.layout,
            source,
            handoff=trial.handoff,
            slo=self.slo,
            link=Link(latency_ns=10_000.0, byte_ns=1e9 / rate) if rate else FREE_LINK,
            message_ms=0.0,
            seed=self.seed,
        )
        tally = Tally()
        with self.watching(f"{trial.mode}, {load_per_s:.3g}/s", self.num_requests) as seen:

            def take(record: RequestRecord) -> None:
                tally.add(record)
                seen(record.finished_ns)

            return tally.summary(simulate_cluster(cluster, on_record=take))

    def verdict(self, trial: Trial, load_per_s: float) -> Verdict:
        """At the load that was asked about, and the largest that is good enough."""
        at_load = self.summary(trial, load_per_s)
        low, high = 0.0, self.service.num_workers / self.service.prefill_s
        binds = ""
        points = {load_per_s: at_load}
        while high - low > 0.02 * high and len(points) <= BISECTIONS:
            middle = (low + high) / 2
            found = points[middle] = self.summary(trial, middle)
            if found.attainment >= self.attainment:
                low = middle
            else:
                high, binds = middle, main_miss(found)
        layout = trial.layout
        split = Split(layout.prefill, layout.decode) if layout.prefill else None
        ttft, tpot = at_load.ttft_ms.mean, at_load.tpot_ms.mean
        return Verdict(
            model=SIMULATED,
            mode=trial.mode,
            prefill_workers=split.prefill_workers if split else None,
            decode_workers=split.decode_workers if split else None,
            ttft_s=None if ttft is None else ttft / 1000,
            tpot_s=None if tpot is None else tpot / 1000,
            decode_seqs=None,
            is_good=at_load.attainment >= self.attainment,
            sustainable_per_s=low,
            binds=binds or NOTHING_FOUND,
            goodput_per_s_by_load=tuple(
                (load, found.attainment * load) for load, found in sorted(points.items())
            ),
        )


def simulated_verdicts(judge: Judge, load_per_s: float) -> list[Verdict]:
    """The three ways; the split is that which the closed forms find best."""
    service = judge.service
    num, whole = service.num_workers, service.prompt_tokens + service.num_workers
    trials = [
        Trial(
            mode=PREFILL_FIRST, layout=Layout(mixed=num, step_tokens=whole + 512, budget="fixed")
        ),
        Trial(
            mode=CHUNKED, layout=Layout(mixed=num, step_tokens=service.chunk_tokens, budget="fixed")
        ),
    ]
    if num > 1:
        best = max(
            range(1, num),
            key=lambda n: find_sustainable(
                split_candidate(service, Split(n, num - n)), judge.slo, service
            )[0],
        )
        layout = Layout(prefill=best, decode=num - best, prefill_step_tokens=whole, budget="fixed")
        trials.append(Trial(mode=SPLIT, layout=layout, handoff="always"))
    return [judge.verdict(trial, load_per_s) for trial in trials]


def main_miss(found: Summary) -> str:
    """The limit that most requests missed."""
    counts = {
        metric: sum(causes.values())
        for metric, causes in found.num_misses_by_metric_and_cause.items()
    }
    return max(counts, key=counts.__getitem__, default="capacity")
