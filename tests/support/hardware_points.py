"""Measured points of public sweeps, as the data-sheet cost model sees them.

The rows are from aiconfigurator's silicon_sample.csv (github ai-dynamo/aiconfigurator, Apache-2.0),
of which EXTRACT is a small part.
"""

import csv
from collections.abc import Iterable
from pathlib import Path

import msgspec

from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Efficiency, Layout
from headrace.plan.presets import package_presets
from headrace.plan.steps import ClosedLoop, closed_loop

EXTRACT = Path(__file__).parents[1] / "unit/plan/hardware_points.csv"
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "MiniMaxAI/MiniMax-M2.5": "MiniMaxAI/MiniMax-M2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B",
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-120b": "openai/gpt-oss-120b",
}
GPUS = {
    "h100_sxm": "H100 SXM",
    "h200_sxm": "H200 SXM",
    "b200_sxm": "B200 SXM",
    "b300_sxm": "B300 SXM",
    "gb200": "GB200",
}
# Rows that do not say their precision are of unquantised checkpoints: their memory and times fit
# no other.
WEIGHTS = {"fp8": "fp8", "fp4": "fp4", "bf16": "bf16", "unspecified": "bf16"}
# KV that an engine keeps for an 8- or 4-bit checkpoint unless told otherwise: TensorRT-LLM follows
# the checkpoint, the others keep the type of the activations.
QUANTISED_KV = {"trtllm": "fp8", "vllm": "bf16", "sglang": "bf16"}

# What an engine keeps of a device for itself, where that is not a tenth and 2 GB. SGLang's own rule
# (512 MB, 1.5 MB for each token of its chunks of 8,192, 2 MB for each sequence of its graphs) says
# 13.4 GB; as many requests wait, with one device, as if it were 12.9.
RESERVED_BYTES = {"sglang": 12.9e9}


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measured load on one configuration."""

    engine: str
    model: str
    gpu: str
    weights: str
    tp: int
    pp: int
    ep: int
    prompt_tokens: float
    output_tokens: float
    concurrency: float
    draws_lengths: bool  # about means, or else they are as they are called
    ttft_ms: float  # 0 where it was not measured
    tpot_ms: float
    tok_s_per_gpu: float

    @property
    def is_moe(self) -> bool:
        return package_presets().model(self.model).num_experts > 0

    @property
    def family(self) -> tuple[str, ...]:
        return (self.engine, self.model, self.gpu, self.weights)

    @property
    def series(self) -> tuple[object, ...]:
        """A whole configuration: all that a sweep over concurrencies keeps."""
        return (*self.family, self.tp, self.pp, self.ep, self.prompt_tokens, self.output_tokens)

    def cost(self, efficiency: Efficiency) -> DataSheetCostModel:
        is_quantised = self.weights != "bf16"
        return DataSheetCostModel(
            model=package_presets().model(self.model),
            accelerator=package_presets().accelerator(self.gpu),
            layout=Layout(tp=self.tp, pp=self.pp, ep=self.ep),
            weight_dtype=self.weights,
            kv_dtype=QUANTISED_KV[self.engine] if is_quantised else "bf16",
            efficiency=msgspec.structs.replace(
                efficiency, reserved_bytes=RESERVED_BYTES.get(self.engine, 0.0)
            ),
        )

    def predicted(self, efficiency: Efficiency, interference_share: float) -> ClosedLoop:
        return closed_loop(
            self.cost(efficiency),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            concurrency=self.concurrency,
            interference_share=interference_share,
        )


def read_points(file: Path) -> Iterable[Point]:
    """Co-located loads with a known concurrency, those marked suspect left out."""
    for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        batch = float(row["batch"] or row["concurrency"] or 0)
        is_known = row["model"] in MODELS and row["gpu"] in GPUS and row["precision"] in WEIGHTS
        is_known &= row["engine"] in QUANTISED_KV and row["mode"] == "agg" and batch > 0
        if not is_known or row["suspect"] or not row["tpot_ms"]:
            continue
        # The dated sweeps draw lengths uniformly from 0.8 to 1.0 of the nominal ones.
        nominal = int(row["isl"]), int(row["osl"])
        draws_lengths = bool(row["measured"]) and set(nominal) <= {1024, 8192}
        mean = 0.9 if draws_lengths else 1.0
        tp, ep, dp = int(row["tp"] or 1), int(row["ep"] or 1), int(row["dp"] or 1)
        if dp > 1 or ep not in (1, tp):
            continue
        yield Point(
            engine=row["engine"],
            model=MODELS[row["model"]],
            gpu=GPUS[row["gpu"]],
            weights=WEIGHTS[row["precision"]],
            tp=tp,
            pp=int(row["pp"] or 1),
            ep=ep,
            prompt_tokens=nominal[0] * mean,
            output_tokens=nominal[1] * mean,
            concurrency=batch,
            draws_lengths=draws_lengths,
            ttft_ms=float(row["ttft_ms"] or 0),
            tpot_ms=float(row["tpot_ms"]),
            tok_s_per_gpu=float(row["out_tok_s_per_gpu"] or 0),
        )
