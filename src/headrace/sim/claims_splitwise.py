"""The claim that prompts and answers on machines of their own serve more for the same cost, by the
steps that were fitted to vLLM, and by those of the published simulator.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from headrace.core.base.request import Slo
from headrace.core.base.types import Ns
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.profiles import WorkloadProfile
from headrace.plan.steps import decode_shape, mean_context_tokens, prefill_shape
from headrace.sim.capacity import Crew, largest_rate, serve
from headrace.sim.claims import BLOOM, GPU, WHOLE, Claim, Effort, device
from headrace.sim.claims_apart import gain, poisson, profile, split, told
from headrace.sim.setup import Device

MOST_TOKENS: Final = 1 << 15  # its simulator knows no limit
SLOWDOWNS: Final = {"ttft": (2.0, 3.0, 6.0), "tpot": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
SHARES: Final = (0.5, 0.9, 0.99)
CONVERSATIONS: Final = profile("conversations", 1155, 211, Slo())
NUM_MACHINES: Final = 7
NUM_PROMPT_MACHINES: Final = (3, 4, 5)
# Of the trace, as its generator gives them: standard deviation over mean.
SPREADS: Final = (1109 / 1155, 163 / 211)
# Of its simulator: 8 · 80 GB, less the weights, of which a token takes 4 MB; a decode machine
# counts the answer's tokens only (task.py).
MACHINE_KV_TOKENS: Final = 71_700
OUTPUT_SHARE: Final = 211 / (1155 + 211)
BATCH_TOKENS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PROMPT_MS: Final = (79.7, 99.2, 174.4, 288.0, 534.5, 1335.2, 3551.6, 5782.0, 11251.8)
TOKEN_MS: Final = (47.6, 47.7, 49.5, 49.4, 50.2, 51.6, 54.3, 65.4, 96.6)
SPLITWISE_SOURCE: Final = (
    "Splitwise (ISCA 2024), section 6.2, figure 18a: Splitwise-AA against Baseline-A100 with the "
    "same power and cost (2.35× is the abstract's); table 6 and Mutinifni/splitwise-sim, "
    "notebooks/plots.ipynb (nine limits, BLOOM-176B), notebooks/utils.py (power of a machine), "
    "configs/cluster/isopower_a100.yaml (70 machines), generate_trace.py (lengths)"
)


def splitwise(effort: Effort) -> Iterator[Claim]:
    """As many machines of the same kind, prompts apart or not: the same cost and power. A cluster
    is good while the 50th, 90th and 99th percentile of the slowdown against an A100 machine of
    one's own keep nine limits.
    """
    machine = device(BLOOM, GPU, 8)
    together = Crew(device=machine, num_workers=NUM_MACHINES, step_tokens=WHOLE, num_gpus=8)
    fewer = msgspec.structs.replace(together, device=device(BLOOM, "H100 SXM", 8), num_workers=4)
    splits = splits_of(machine, machine)
    clusters = {
        "together": [together],
        **splits,
        "in chunks of 512": [msgspec.structs.replace(together, step_tokens=512)],
        "4 of H100s together": [fewer],
    }
    yield claim_of(
        "Splitwise, the same machines",
        rates_of(clusters, machine.cost, effort),
        splits,
        setting="steps as fitted to vLLM",
        gap="its simulator takes other steps and counts less memory: see the next claim",
    )
    cost = SplitwiseSteps()
    num_blocks = MACHINE_KV_TOKENS // machine.block_size
    own = msgspec.structs.replace(
        machine,
        cost=cost,
        believed=FittedCostModel.like(cost, max_tokens=4096),
        num_blocks=num_blocks,
    )
    decode = msgspec.structs.replace(own, num_blocks=round(num_blocks / OUTPUT_SHARE))
    splits = splits_of(own, decode, max_seqs=512)
    whole = Crew(device=own, num_workers=NUM_MACHINES, step_tokens=2048, num_gpus=8, max_seqs=512)
    yield claim_of(
        "Splitwise, by its simulator's steps",
        rates_of({"together": [whole], **splits}, cost, effort),
        splits,
        setting="steps and memory as its simulator counts them: a step that decodes n sequences "
        "takes what was measured of batches whose prompts had n tokens in all (48 ms, where 64 "
        "sequences were measured at 97 ms), and a decode machine holds the answers' KV, not that "
        "of prompts",
        gap="7 of its 70 machines, none of which changes sides, under other schedulers; what "
        "else makes its gain is not found",
    )


def splits_of(prompts: Device, decode: Device, max_seqs: int = 256) -> dict[str, list[Crew]]:
    found = {}
    for num in NUM_PROMPT_MACHINES:
        first, then = split(prompts, num, NUM_MACHINES - num, 8)
        then = msgspec.structs.replace(then, device=decode, max_seqs=max_seqs)
        found[f"{num}P:{NUM_MACHINES - num}D"] = [first, then]
    return found


def rates_of(
    clusters: Mapping[str, Sequence[Crew]], alone: CostModel, effort: Effort
) -> dict[str, float]:
    holds = partial(slowdowns_hold, effort=effort, alone=Alone(alone))
    return {
        name: largest_rate(partial(holds, crews, CONVERSATIONS), 4.0)
        for name, crews in clusters.items()
    }


def claim_of(
    name: str, rates: dict[str, float], splits: Mapping[str, object], *, setting: str, gap: str
) -> Claim:
    return Claim(
        name=name,
        published="2.15×, 2.35×",
        published_figures=(2.15, 2.35),
        ours=gain(rates, *splits),
        unit="×",
        setting=f"BLOOM-176B on {NUM_MACHINES} machines of 8 A100s (a tenth of theirs; the power "
        "of 4 of H100s), lengths of Azure's conversations of 2023, nine limits on slowdowns; "
        f"{setting}: " + told(rates, ""),
        source=SPLITWISE_SOURCE,
        gap=gap,
    )


class SplitwiseSteps:
    """The CostModel of a machine of 8 A100s in Splitwise's simulator (performance_model.py): lines
    between its measurements of BLOOM-176B (data/perf_model.csv, MIT; medians), by the tokens of a
    step. A step that mixes both takes a tenth longer than prompts of so many tokens.
    """

    def step_ns(self, shape: StepShape) -> Ns:
        num = shape.num_tokens
        if num == shape.num_seqs:
            return Ns(round(_between(num, TOKEN_MS) * 1e6))
        mixed = 1.1 if shape.num_seqs > 1 else 1.0
        return Ns(round(_between(num, PROMPT_MS) * mixed * 1e6))

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        """Links are the network's."""
        return Ns(1)


def _between(num_tokens: int, measured_ms: Sequence[float]) -> float:
    """Beyond both ends the lines go on."""
    place = min(max(bisect_right(BATCH_TOKENS, num_tokens) - 1, 0), len(BATCH_TOKENS) - 2)
    low, high = BATCH_TOKENS[place : place + 2]
    below, above = measured_ms[place : place + 2]
    return below + (above - below) * (num_tokens - low) / (high - low)


class Alone:
    """What a request takes on a machine of its own."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def slowdowns(self, record: RequestRecord) -> Iterator[tuple[str, float]]:
        prompt, output = record.num_prompt_tokens, record.num_output_tokens
        first_ns = self._cost.step_ns(prefill_shape(1, prompt))
        token_ns = self._cost.step_ns(decode_shape(1, mean_context_tokens(prompt, output)))
        if record.ttft_ns is not None:
            yield "ttft", record.ttft_ns / first_ns
        if record.tpot_ns is not None:
            yield "tpot", record.tpot_ns / token_ns
        yield "e2e", record.e2e_ns / (first_ns + (output - 1) * token_ns)


def slowdowns_hold(
    crews: Sequence[Crew],
    traffic: WorkloadProfile,
    rate_per_s: float,
    *,
    effort: Effort,
    alone: Alone,
) -> bool:
    ratios: dict[str, list[float]] = {name: [] for name in SLOWDOWNS}

    def note(record: RequestRecord) -> None:
        for name, ratio in alone.slowdowns(record):
            ratios[name].append(ratio)

    source = poisson(traffic, rate_per_s, effort, most_tokens=MOST_TOKENS, spreads=SPREADS)
    with effort.watched(f"{rate_per_s:.3g} requests/s", effort.num_requests, note) as heard:
        serve(crews, source, slo=Slo(), on_record=heard)
    for name, limits in SLOWDOWNS.items():
        ordered = sorted(ratios[name])
        for share, limit in zip(SHARES, limits, strict=True):
            if ordered[min(len(ordered) - 1, int(share * len(ordered)))] > limit:
                return False
    return True
