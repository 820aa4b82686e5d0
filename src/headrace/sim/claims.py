"""What the field claims, and what the simulator says of the same settings as far as they are known.

Each claim is a comparison of two ways to serve the same requests on the same devices. Decides which
settings stand for a published one; refuses to know how anything is scheduled.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Final

import msgspec

from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, SeqId
from headrace.core.base.worker import Role
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.core.cost.model import CostModel
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.profiles import WorkloadProfile
from headrace.core.workload.source import Listed
from headrace.core.workload.synthetic import Synthetic, SyntheticSource
from headrace.core.workload.traces import TraceRequest
from headrace.plan.engines import Engine
from headrace.plan.presets import ModelRow, package_presets
from headrace.plan.steps import decode_shape, mean_context_tokens, prefill_shape
from headrace.sim.capacity import Crew, largest_rate, serve, share_is_good
from headrace.sim.setup import VOCAB, Device

GPU: Final = "A100 SXM 80GB"
WHOLE: Final = 1 << 15  # tokens of a step that takes prompts whole


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Both figures are ratios, or shares where `unit` says so."""

    name: str
    published: str
    ours: float
    unit: str  # "×" or "%"
    setting: str
    gap: str  # why ours is another figure


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int = 200  # of a run
    seed: int = 0
    trace: tuple[TraceRequest, ...] = ()  # Mooncake's conversations


def opt(name: str, params_b: float, layers: int, hidden: int, heads: int) -> ModelRow:
    """Shapes of OPT (Zhang et al. 2022): every head has keys and values of its own."""
    return ModelRow(
        name=name,
        params_b=params_b,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=50272,
        tied=True,
        source="OPT (Zhang et al. 2022), table 1",
    )


OPT_13B: Final = opt("OPT-13B", 12.85, 40, 5120, 40)
OPT_66B: Final = opt("OPT-66B", 65.72, 64, 9216, 72)


def cost_of(model: ModelRow | str, gpu: str, tp: int) -> DataSheetCostModel:
    """With the efficiencies that were fitted to vLLM, whatever a claim was measured on."""
    presets = package_presets()
    return DataSheetCostModel(
        model=presets.model(model) if isinstance(model, str) else model.build(),
        accelerator=presets.accelerator(gpu),
        layout=Layout(tp=tp),
        efficiency=Engine.named("vllm").efficiency,
    )


def device(model: ModelRow | str, gpu: str, tp: int, *, block_size: int = 16) -> Device:
    return Device.of_data_sheet(cost_of(model, gpu, tp), block_size=block_size)


def profile(name: str, prompt: int, output: int, slo: Slo) -> WorkloadProfile:
    return WorkloadProfile(
        name=name, purpose="", prompt_tokens=prompt, output_tokens=output, slo=slo
    )


# ---- continuous against static batching


def batching(effort: Effort) -> Iterator[Claim]:
    """Static batches are the production scheduler with nobody waiting: a batch is let in at once
    and the next one when its last answer ends.
    """
    one = device(OPT_13B, "A100 SXM 80GB", 1)
    rng = Random(effort.seed)
    outputs = [
        max(1, min(1536, round(rng.expovariate(1 / 128)))) for _ in range(effort.num_requests)
    ]
    for num_seqs, num_prompt in ((8, 512), (32, 512), (32, 32)):
        crew = Crew(device=one, num_workers=1, step_tokens=2048, max_seqs=num_seqs)
        batches = [outputs[i : i + num_seqs] for i in range(0, len(outputs), num_seqs)]
        static_s = sum(span_s(crew, batch, num_prompt) for batch in batches)
        yield Claim(
            name=f"continuous batching, {num_seqs} at once, prompts of {num_prompt}",
            published="3-5×",
            ours=static_s / span_s(crew, outputs, num_prompt),
            unit="×",
            setting=f"OPT-13B on an A100, {len(outputs)} prompts at once, outputs exponential with "
            "mean 128, cut at 1536 (Anyscale 2023)",
            gap="a batch lasts as long as its longest answer, some H(n) means of n (2.7 of 8, 4.1 "
            "of 32), but prompts cost both the same, and whoever has ended here makes the steps of "
            "a static batch no longer; padded ones are slower",
        )


def span_s(crew: Crew, outputs: Sequence[int], num_prompt: int) -> float:
    """From the first arrival to the last token of prompts that come together."""
    specs = [
        SeqSpec(
            seq_id=SeqId(index),
            request_id=str(index),
            prompt_tokens=tuple((index * 977 + i) % VOCAB for i in range(num_prompt)),
            params=SamplingParams(max_tokens=num, ignore_eos=True),
        )
        for index, num in enumerate(outputs)
    ]
    return serve([crew], Listed(specs), slo=Slo(), on_record=lambda _: None).end_ns / NS_PER_S


# ---- disaggregation


def distserve(effort: Effort) -> Iterator[Claim]:
    """Rates per GPU at which 90 % of requests keep both limits, of one instance that does both, and
    of a prefill and a decode instance in the paper's placement (DistServe, OSDI 2024); and the same
    with as many GPUs in instances that do both behind a router.
    """
    chat = profile("ShareGPT", 756, 200, Slo(ttft_ms=250.0, tpot_ms=100.0))
    code = profile("HumanEval", 171, 98, Slo(ttft_ms=125.0, tpot_ms=200.0))
    for name, published, model, prefill_tp, tp, traffic in (
        ("DistServe, chat", "2.0-4.6×, up to 7.4× of all", OPT_13B, 2, 1, chat),
        ("DistServe, code", "5.7×", OPT_66B, 4, 4, code),
    ):
        one = Crew(device=device(model, GPU, tp), num_workers=1, step_tokens=WHOLE, num_gpus=tp)
        as_many = msgspec.structs.replace(one, num_workers=prefill_tp // tp + 1)
        prompts = Crew(
            device=device(model, GPU, prefill_tp),
            num_workers=1,
            role=Role.PREFILL,
            step_tokens=WHOLE,
            num_gpus=prefill_tp,
        )
        decode = Crew(device=one.device, num_workers=1, role=Role.DECODE, num_gpus=tp)
        clusters = {
            "together": [one],
            "apart": [prompts, decode],
            f"{as_many.num_workers} together": [as_many],
            "in chunks of 512": [msgspec.structs.replace(as_many, step_tokens=512)],
        }
        rates = {key: rate_per_gpu(crews, traffic, effort) for key, crews in clusters.items()}
        yield Claim(
            name=name,
            published=published,
            ours=gain(rates, "apart"),
            unit="×",
            setting=f"{model.name}, TP{tp} on A100s, prefill apart with TP{prefill_tp}, lengths of "
            f"{traffic.name}, TTFT {traffic.slo.ttft_ms:g} ms, TPOT {traffic.slo.tpot_ms:g} ms, "
            "90 %: " + told(rates, "per GPU"),
            gap="one instance alone is a queue of one server, and vLLM of 2023 let prompts stop "
            "all who decode, where they get their token here in the same step",
        )


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
            max_tokens=2048,
            vocab_size=VOCAB,
            seed=effort.seed,
        )
    )


# ---- the same cost and power


SLOWDOWNS: Final = {"ttft": (2.0, 3.0, 6.0), "tpot": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
SHARES: Final = (0.5, 0.9, 0.99)


def splitwise(effort: Effort) -> Iterator[Claim]:
    """As many machines of the same kind, prompts apart or not: the same cost and power. A cluster
    is good while the 50th, 90th and 99th percentile of the slowdown against an A100 machine of
    one's own keep Splitwise's nine limits (ISCA 2024, table 6).
    """
    model = "meta-llama/Llama-2-70b"
    machine = device(model, GPU, 8)
    traffic = profile("conversations", 1155, 211, Slo())
    together = Crew(device=machine, num_workers=7, step_tokens=WHOLE, num_gpus=8)
    fewer = msgspec.structs.replace(together, device=device(model, "H100 SXM", 8), num_workers=4)
    clusters = {
        "together": [together],
        "3P:4D": split(machine, 3, 4, 8),
        "4P:3D": split(machine, 4, 3, 8),
        "in chunks of 512": [msgspec.structs.replace(together, step_tokens=512)],
        "4 of H100s together": [fewer],
    }
    alone = Alone(machine.cost)
    rates = {}
    for name, crews in clusters.items():
        rates[name] = largest_rate(partial(slowdowns_hold, crews, traffic, effort, alone), 8.0)
    yield Claim(
        name="Splitwise, the same machines",
        published="2.35×",
        ours=gain(rates, "3P:4D", "4P:3D"),
        unit="×",
        setting="Llama-2-70B on 7 machines of 8 A100s (the power of 4 of H100s), lengths of "
        "Azure's conversations of 2023, nine limits on slowdowns: " + told(rates, ""),
        gap="whole prompts share their step with who decodes, so that workers that do both lose "
        "less; Splitwise also moves machines between the phases, and has 40 and 70 requests/s",
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
