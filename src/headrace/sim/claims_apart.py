"""Claims that prompts and answers on machines of their own serve more."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.worker import Role
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.source import Listed, Source
from headrace.core.workload.synthetic import Synthetic, SyntheticSource
from headrace.plan.presets import ModelRow
from headrace.sim.capacity import Crew, largest_rate, serve, share_is_good
from headrace.sim.claims import (
    GPU,
    OPT_13B,
    OPT_66B,
    WHOLE,
    Claim,
    Effort,
    device,
)
from headrace.sim.setup import VOCAB, Device

MOST_TOKENS: Final = 2048  # of OPT


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
    published_figures: tuple[float, ...]
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
        published_figures=(2.0, 4.6),
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
        published_figures=(5.7,),
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
        published_figures=(4.3,),
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
            published_figures=task.published_figures,
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
            run_name = f"{traffic.name}, {rate_per_s:.3g} requests/s"
            with effort.watched(run_name, effort.num_requests, note) as heard:
                return serve(crews, source, slo=traffic.slo, on_record=heard)

        return share_is_good(run, effort.num_requests, share)

    return largest_rate(is_good, start=num_gpus) / num_gpus


def poisson(
    traffic: WorkloadProfile,
    rate_per_s: float,
    effort: Effort,
    *,
    most_tokens: int = MOST_TOKENS,
    spreads: tuple[float, float] = (0.6, 1.0),
) -> Source:
    """Prompts that would leave their answer no room are cut, not the answer. `spreads` are those of
    prompts and of answers, standard deviation over mean.
    """
    source = SyntheticSource(
        Synthetic(
            profile=traffic,
            arrivals=Arrivals.steady(rate_per_s),
            num_requests=effort.num_requests,
            prompt_spread=spreads[0],
            output_spread=spreads[1],
            vocab_size=VOCAB,
            seed=effort.seed,
        )
    )
    return Listed(fitting(spec, most_tokens) for spec in source.arrivals())


def fitting(spec: SeqSpec, most_tokens: int) -> SeqSpec:
    num_output = min(spec.params.max_tokens, most_tokens // 2)
    return msgspec.structs.replace(
        spec,
        prompt_tokens=spec.prompt_tokens[: most_tokens - num_output],
        params=msgspec.structs.replace(spec.params, max_tokens=num_output),
    )
