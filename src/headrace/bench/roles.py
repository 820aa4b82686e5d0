"""Workers that change their roles as the traffic's mix does, beside fixed splits and mixed workers.

    python -m headrace.bench.roles [--prompts R] [--answers R] [--seeds N] [--json]

Ten minutes of long prompts, then ten of long answers, on four simulated workers (`sim/cluster.py`),
each five times as slow as the prior of `core/cost/fitted.py`. The same on every machine.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.source import Listed
from headrace.sim.cluster import simulate_cluster
from headrace.sim.scaling import Autoscale
from headrace.sim.setup import Device, Layout, build_cluster
from headrace.sim.summary import Tally

SLO: Final = Slo(ttft_ms=10_000.0, itl_ms=250.0)
PHASE_S: Final = 600.0
# Mean tokens of prompts and answers.
LONG_PROMPTS: Final = (800, 20)
LONG_ANSWERS: Final = (60, 300)
SLOWER: Final = 5.0


def slow(factor: float) -> FittedCostModel:
    """So many times as slow as the prior."""
    prior = FittedCostModel.prior()
    return FittedCostModel(
        name="slow",
        knot_ns=tuple(cost * factor for cost in prior.knot_ns),
        seq_ns=prior.seq_ns * factor,
        logit_row_ns=prior.logit_row_ns * factor,
        attention_pair_ns=prior.attention_pair_ns * factor,
        kv_token_ns=prior.kv_token_ns * factor,
    )


DEVICE: Final = Device(
    cost=slow(SLOWER),
    believed=slow(SLOWER),
    num_blocks=4096,
    block_size=16,
    kv_block_bytes=1 << 16,
    max_model_len=4096,
)
LAYOUT: Final = Layout(prefill=2, decode=2, step_tokens=512)  # of the begin


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    layout: Layout
    switches: bool = False


CASES: Final = (
    Case("fixed 1 + 3", Layout(prefill=1, decode=3, step_tokens=512)),
    Case("fixed 2 + 2", LAYOUT),
    Case("fixed 3 + 1", Layout(prefill=3, decode=1, step_tokens=512)),
    Case("switches", LAYOUT, switches=True),
    Case("mixed 4", Layout(mixed=4, step_tokens=512)),
)


def mix(rng: Random, phase_s: float, *, prompts: float = 0.5, answers: float = 1.1) -> Listed:
    """So many requests per second with long prompts for a phase, then with long answers for one.
    Lengths are within half of their means.
    """
    specs: list[SeqSpec] = []
    for begin_s, rate, (num_prompt, num_output) in (
        (0.0, prompts, LONG_PROMPTS),
        (phase_s, answers, LONG_ANSWERS),
    ):
        now_s = begin_s
        while (now_s := now_s + rng.expovariate(rate)) < begin_s + phase_s:
            length = round(num_prompt * rng.uniform(0.5, 1.5))
            num_tokens = round(num_output * rng.uniform(0.5, 1.5))
            specs.append(
                SeqSpec(
                    seq_id=SeqId(len(specs)),
                    request_id=str(len(specs)),
                    prompt_tokens=tuple(rng.randrange(1 << 15) for _ in range(length)),
                    params=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
                    slo=SLO,
                    arrived_ns=Ns(round(now_s * NS_PER_S)),
                )
            )
    return Listed(specs)


def measure(case: Case, seed: int, prompts: float, answers: float) -> dict[str, float]:
    """With so many requests per second in the two phases."""
    # No worker ends within the run, so that all cases have the same number of them.
    config = AutoscalerConfig(max_replicas=case.layout.num_workers, down_delay_s=2 * PHASE_S)
    cluster = build_cluster(
        DEVICE,
        case.layout,
        mix(Random(seed), PHASE_S, prompts=prompts, answers=answers),
        handoff="always",
        slo=SLO,
        autoscale=Autoscale(config=config) if case.switches else None,
        seed=seed,
    )
    tally, first, second = Tally(), Tally(), Tally(PHASE_S)

    def take(record: RequestRecord) -> None:
        for one in (tally, second, *([first] if record.arrived_ns < PHASE_S * NS_PER_S else [])):
            one.add(record)

    report = simulate_cluster(cluster, on_record=take)
    found = tally.summary(report)
    return {
        "goodput_per_s": found.goodput_per_s,
        "attainment": found.attainment,
        "long_prompts": first.summary(report).attainment,
        "long_answers": second.summary(report).attainment,
        "ttft_ms_p90": found.ttft_ms.p90 or 0.0,
        "tpot_ms_p90": found.tpot_ms.p90 or 0.0,
        "num_switches": len(report.scaling.switches) if report.scaling else 0,
        "num_refused": found.num_rejected,
    }


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.roles", description=__doc__)
    parser.add_argument("--prompts", type=float, default=0.8, help="requests/s of the first phase")
    parser.add_argument("--answers", type=float, default=1.1, help="likewise, of the second one")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(args)
    for case in CASES:
        runs = [measure(case, seed, asked.prompts, asked.answers) for seed in range(asked.seeds)]
        means = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
        if asked.json:
            print(json.dumps({"case": case.name, **means}), flush=True)
            continue
        print(
            f"{case.name:12} {means['goodput_per_s']:.3f} good/s  {means['attainment']:.2%}"
            f" ({means['long_prompts']:.2%}, {means['long_answers']:.2%})"
            f"  TTFT p90 {means['ttft_ms_p90']:,.0f} ms  TPOT p90 {means['tpot_ms_p90']:.0f} ms"
            f"  {means['num_switches']:.1f} switches",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
