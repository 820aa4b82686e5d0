"""What the field claims, and what the simulator says of the same settings as far as they are known.

Each claim is a comparison of two ways to serve the same requests on the same devices. Decides which
settings stand for a published one; refuses to know how anything is scheduled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Final

import msgspec

from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, SeqId
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Accelerator, Layout
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.source import Listed
from headrace.core.workload.traces import TraceRequest
from headrace.plan.engines import Engine
from headrace.plan.presets import ModelRow, package_presets
from headrace.sim.capacity import Crew, serve
from headrace.sim.progress import Watching, unwatched
from headrace.sim.setup import VOCAB, Device

GPU: Final = "A100 SXM 80GB"
ONE_GPU: Final = Layout()
WHOLE: Final = 1 << 15  # tokens of a step that takes prompts whole


Hearing = Callable[[RequestRecord], None]


def unheard(_: RequestRecord) -> None:
    """Only the end of the run matters."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """All figures are ratios, or shares where `unit` says so."""

    name: str
    published: str
    published_figures: tuple[float, ...]  # those of `published`, or the ends of its range
    ours: float
    unit: str  # "×" or "%"
    setting: str
    source: str  # of the setting and of the published figure
    gap: str  # why ours is another figure


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int = 200  # of a run
    seed: int = 0
    trace: tuple[TraceRequest, ...] = ()  # Mooncake's conversations
    watching: Watching = unwatched

    @contextmanager
    def watched(self, run: str, num_requests: int, hear: Hearing = unheard) -> Iterator[Hearing]:
        """Who hears of a run's requests: `hear`, and whoever watches."""
        with self.watching(run, num_requests) as seen:

            def both(record: RequestRecord) -> None:
                seen(record.finished_ns)
                hear(record)

            yield both


def dense(
    name: str, params_b: float, layers: int, hidden: int, heads: int, vocab: int, source: str
) -> ModelRow:
    """A model of which every head has keys and values of its own."""
    return ModelRow(
        name=name,
        params_b=params_b,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=vocab,
        tied=True,
        source=source,
    )


OPT: Final = "OPT (Zhang et al. 2022), table 1"
OPT_13B: Final = dense("OPT-13B", 12.85, 40, 5120, 40, 50272, OPT)
OPT_66B: Final = dense("OPT-66B", 65.72, 64, 9216, 72, 50272, OPT)
BLOOM: Final = dense(
    "BLOOM-176B", 176.25, 70, 14336, 112, 250880, "BLOOM (Le Scao et al. 2022), table 3"
)


def cost_of(
    model: ModelRow | str, gpu: Accelerator | str, layout: Layout = ONE_GPU
) -> DataSheetCostModel:
    """With the efficiencies that were fitted to vLLM, whatever a claim was measured on."""
    presets = package_presets()
    return DataSheetCostModel(
        model=presets.model(model) if isinstance(model, str) else model.build(),
        accelerator=presets.accelerator(gpu) if isinstance(gpu, str) else gpu,
        layout=layout,
        efficiency=Engine.named("vllm").efficiency,
    )


def device(
    model: ModelRow | str,
    gpu: Accelerator | str,
    tp: int = 1,
    *,
    pp: int = 1,
    block_size: int = 16,
) -> Device:
    return Device.of_data_sheet(cost_of(model, gpu, Layout(tp=tp, pp=pp)), block_size=block_size)


# ---- continuous against static batching


# The longest answer, and how many requests of which each may become as long were given to the
# static engines of the comparison at once.
STATIC_BATCHES: Final = ((32, 16), (128, 12), (512, 8), (1536, 4))
PROMPT: Final = 512
MEAN_OUTPUT: Final = 128
STEP_TOKENS: Final = 8100
BATCHING_SOURCE: Final = (
    "Anyscale, How continuous batching enables 23x throughput in LLM inference, 2023: "
    "FasterTransformer 4×, text-generation-inference 8× and vLLM 23× Hugging Face's pipelines at "
    "the longest answers; anyscale/llm-continuous-batching-benchmarks, benchmark_configs"
)


def batching(effort: Effort) -> Iterator[Claim]:
    """Static batches are the production scheduler with nobody waiting: a batch is let in at once
    and the next one when its last answer ends.
    """
    smaller = msgspec.structs.replace(
        package_presets().accelerator(GPU),
        name="A100 SXM 40GB",
        memory_bytes=40e9,
        memory_bytes_per_s=1.555e12,
    )
    one = device(OPT_13B, smaller)
    whole = Crew(device=one, num_workers=1, step_tokens=STEP_TOKENS)
    rng = Random(effort.seed)
    for longest, num_seqs in STATIC_BATCHES:
        outputs = short_outputs(rng, longest, effort.num_requests)
        static = msgspec.structs.replace(whole, max_seqs=num_seqs)
        batches = [outputs[i : i + num_seqs] for i in range(0, len(outputs), num_seqs)]
        with effort.watched(f"static, up to {longest}", len(outputs)) as heard:
            static_s = sum(span_s(static, batch, PROMPT, heard) for batch in batches)
        with effort.watched(f"continuous, up to {longest}", len(outputs)) as heard:
            ours_s = span_s(whole, outputs, PROMPT, heard)
        rates = [sum(outputs) / span for span in (static_s, ours_s)]
        is_longest = longest == STATIC_BATCHES[-1][0]
        yield Claim(
            name=f"continuous batching, answers up to {longest}",
            published="5.8× (23 / 4)" if is_longest else "3-5×",
            published_figures=(5.8,) if is_longest else (3.0, 5.0),
            ours=static_s / ours_s,
            unit="×",
            setting=f"OPT-13B on an A100 of 40 GB, {len(outputs)} prompts of {PROMPT} at once, "
            f"outputs exponential with mean {MEAN_OUTPUT}, none above {longest}; static batches of "
            f"{num_seqs}: {rates[0]:,.0f} against {rates[1]:,.0f} tokens/s",
            source=BATCHING_SOURCE,
            gap="a batch lasts as long as its longest answer, and has as few requests as could all "
            "have the longest one; prompts cost both the same, whoever has ended here makes the "
            "steps of a static batch no longer, and both have the kernels of one engine",
        )


def short_outputs(rng: Random, longest: int, number: int) -> list[int]:
    """Lengths that are exponential, and drawn again where they are longer."""
    outputs: list[int] = []
    while len(outputs) < number:
        length = max(1, round(rng.expovariate(1 / MEAN_OUTPUT)))
        if length <= longest:
            outputs.append(length)
    return outputs


def span_s(crew: Crew, outputs: Sequence[int], num_prompt: int, hear: Hearing = unheard) -> float:
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
    return serve([crew], Listed(specs), slo=Slo(), on_record=hear).end_ns / NS_PER_S
