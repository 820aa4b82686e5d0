"""Claims that prompts and answers on machines of their own serve more."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from headrace.core.base.request import Slo
from headrace.core.base.worker import Role
from headrace.core.cost.model import CostModel
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.synthetic import Synthetic, SyntheticSource
from headrace.plan.presets import ModelRow
from headrace.plan.steps import decode_shape, mean_context_tokens, prefill_shape
from headrace.sim.capacity import Crew, largest_rate, serve, share_is_good
from headrace.sim.claims import (
    BLOOM,
    GPU,
    OPT_13B,
    OPT_66B,
    WHOLE,
    Claim,
    Effort,
    device,
)
from headrace.sim.setup import VOCAB, Device

MOST_TOKENS: Final = 2048  # of OPT and BLOOM


def profile(name: str, prompt: int, output: int, slo: Slo) -> WorkloadProfile:
    return WorkloadProfile(
        name=name, purpose="", prompt_tokens=prompt, output_tokens=output, slo=slo
    )


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One of DistServe's: the ranks of its baseline, and of the two instances of its placement. An
    instance with two pipeline stages has two batches under way, each with half of its memory.
    """

    name: str
    published: str
    model: ModelRow
    tp: int
    prefill_tp: int
    decode_tp: int
    decode_pp: int
    traffic: WorkloadProfile

    @property
    def num_gpus(self) -> int:
        return self.prefill_tp + self.decode_tp * self.decode_pp


CHAT: Final = profile("ShareGPT", 756, 200, Slo(ttft_ms=250.0, tpot_ms=100.0))
CODE: Final = profile("HumanEval", 171, 98, Slo(ttft_ms=125.0, tpot_ms=200.0))
SUMMARY: Final = profile("LongBench", 1738, 91, Slo(ttft_ms=15_000.0, tpot_ms=150.0))
TASKS: Final = (
    Task(
        name="DistServe, chat",
        published="2.0-4.6×",
        model=OPT_13B,
        tp=1,
        prefill_tp=2,
        decode_tp=1,
        decode_pp=1,
        traffic=CHAT,
    ),
    Task(
        name="DistServe, code",
        published="5.7×",
        model=OPT_66B,
        tp=4,
        prefill_tp=4,
        decode_tp=2,
        decode_pp=2,
        traffic=CODE,
    ),
    Task(
        name="DistServe, summaries",
        published="4.3×",
        model=OPT_66B,
        tp=4,
        prefill_tp=4,
        decode_tp=2,
        decode_pp=2,
        traffic=SUMMARY,
    ),
)
DISTSERVE_SOURCE: Final = (
    "DistServe (OSDI 2024), tables 1 and 3, figures 8 and 9, as later papers and notes give them; "
    "placements and limits also in LLMServe/DistServe, evaluation/2-benchmark-serving/"
    "2-start-api-server.py and simdistserve/benchmarks/figure11-abalation/01-run_abalation.sh, "
    "where chat has a TTFT of 200 ms, as in the paper's first version; mean lengths are not "
    "checked. Measured there (alignment/data-ground-truth/opt-13b-sharegpt/vllm-100-1.exp): vLLM "
    "alone keeps both limits of chat for 86 of 100 requests at 0.87/s"
)


def distserve(effort: Effort) -> Iterator[Claim]:
    """Rates per GPU at which 90 % of requests keep both limits, of one instance that does both, and
    of a prefill and a decode instance in the paper's placement; and the same with as many GPUs in
    instances that do both behind a router.
    """
    for task in TASKS:
        clusters = clusters_of(task)
        rates = {key: rate_per_gpu(crews, task.traffic, effort) for key, crews in clusters.items()}
        slo = task.traffic.slo
        yield Claim(
            name=task.name,
            published=task.published,
            ours=gain(rates, "apart"),
            unit="×",
            setting=f"{task.model.name}, TP{task.tp} on A100s, prefill apart with "
            f"TP{task.prefill_tp}, decode with TP{task.decode_tp} PP{task.decode_pp}, lengths of "
            f"{task.traffic.name}, TTFT {slo.ttft_ms:g} ms, TPOT {slo.tpot_ms:g} ms, 90 %: "
            + told(rates, "per GPU"),
            source=DISTSERVE_SOURCE,
            gap="one instance alone is a queue of one server; as many GPUs in instances behind a "
            "router show what is left of the gain, and there the authors' own simulator finds "
            "little, too (figure_11a.json: 89.7 % apart and 89.5 % in vLLM's best placement are "
            "good at 2 requests/s per GPU)",
        )


def clusters_of(task: Task) -> dict[str, list[Crew]]:
    one = Crew(
        device=device(task.model, GPU, task.tp),
        num_workers=1,
        step_tokens=WHOLE,
        num_gpus=task.tp,
    )
    as_many = msgspec.structs.replace(one, num_workers=task.num_gpus // task.tp)
    prompts = Crew(
        device=device(task.model, GPU, task.prefill_tp),
        num_workers=1,
        role=Role.PREFILL,
        step_tokens=WHOLE,
        num_gpus=task.prefill_tp,
    )
    decode = Crew(
        device=device(task.model, GPU, task.decode_tp, pp=task.decode_pp),
        num_workers=task.decode_pp,
        role=Role.DECODE,
        num_gpus=task.decode_tp,
    )
    return {
        "together": [one],
        "apart": [prompts, decode],
        f"{as_many.num_workers} together": [as_many],
        "in chunks of 512": [msgspec.structs.replace(as_many, step_tokens=512)],
    }


def gain(rates: dict[str, float], *apart: str) -> float:
    """The best of those that are apart over whole prompts first on workers that do both."""
    best = max(rates[name] for name in apart)
    return best / rates["together"] if rates["together"] else float("inf")


def told(rates: dict[str, float], unit: str) -> str:
    return ", ".join(f"{name} {rate:.2f}/s {unit}".rstrip() for name, rate in rates.items())


def split(one: Device, prefill: int, decode: int, num_gpus: int) -> list[Crew]:
    return [
        Crew(
            device=one,
            num_workers=prefill,
            role=Role.PREFILL,
            step_tokens=WHOLE,
            num_gpus=num_gpus,
        ),
        Crew(device=one, num_workers=decode, role=Role.DECODE, num_gpus=num_gpus),
    ]


def rate_per_gpu(
    crews: Sequence[Crew], traffic: WorkloadProfile, effort: Effort, share: float = 0.9
) -> float:
    num_gpus = sum(crew.num_workers * crew.num_gpus for crew in crews)

    def is_good(rate_per_s: float) -> bool:
        source = poisson(traffic, rate_per_s, effort)

        def run(note: Callable[[RequestRecord], None]) -> object:
            return serve(crews, source, slo=traffic.slo, on_record=note)

        return share_is_good(run, effort.num_requests, share)

    return largest_rate(is_good, start=num_gpus) / num_gpus


def poisson(traffic: WorkloadProfile, rate_per_s: float, effort: Effort) -> SyntheticSource:
    return SyntheticSource(
        Synthetic(
            profile=traffic,
            arrivals=Arrivals.steady(rate_per_s),
            num_requests=effort.num_requests,
            max_tokens=MOST_TOKENS,
            vocab_size=VOCAB,
            seed=effort.seed,
        )
    )


# ---- the same cost and power


SLOWDOWNS: Final = {"ttft": (2.0, 3.0, 6.0), "tpot": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
SHARES: Final = (0.5, 0.9, 0.99)
CONVERSATIONS: Final = profile("conversations", 1155, 211, Slo())
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
    together = Crew(device=machine, num_workers=7, step_tokens=WHOLE, num_gpus=8)
    fewer = msgspec.structs.replace(together, device=device(BLOOM, "H100 SXM", 8), num_workers=4)
    splits = {f"{num}P:{7 - num}D": split(machine, num, 7 - num, 8) for num in (3, 4, 5)}
    clusters = {
        "together": [together],
        **splits,
        "in chunks of 512": [msgspec.structs.replace(together, step_tokens=512)],
        "4 of H100s together": [fewer],
    }
    alone = Alone(machine.cost)
    rates = {}
    for name, crews in clusters.items():
        rates[name] = largest_rate(
            partial(slowdowns_hold, crews, CONVERSATIONS, effort, alone), 4.0
        )
    yield Claim(
        name="Splitwise, the same machines",
        published="2.15×, 2.35×",
        ours=gain(rates, *splits),
        unit="×",
        setting="BLOOM-176B on 7 machines of 8 A100s (a tenth of theirs; the power of 4 of H100s), "
        "lengths of Azure's conversations of 2023, nine limits on slowdowns: " + told(rates, ""),
        source=SPLITWISE_SOURCE,
        gap="a tenth of the machines leaves fewer splits to choose from, and Splitwise lends "
        "machines from one phase to the other; both baselines mix phases in a step, and what else "
        "makes its gain is not found",
    )


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
    effort: Effort,
    alone: "Alone",
    rate_per_s: float,
) -> bool:
    ratios: dict[str, list[float]] = {name: [] for name in SLOWDOWNS}

    def note(record: RequestRecord) -> None:
        for name, ratio in alone.slowdowns(record):
            ratios[name].append(ratio)

    serve(crews, poisson(traffic, rate_per_s, effort), slo=Slo(), on_record=note)
    for name, limits in SLOWDOWNS.items():
        ordered = sorted(ratios[name])
        for share, limit in zip(SHARES, limits, strict=True):
            if ordered[min(len(ordered) - 1, int(share * len(ordered)))] > limit:
                return False
    return True
