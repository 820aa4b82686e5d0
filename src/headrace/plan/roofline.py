"""The roofline of one batch: which resource is the wall, and what TTFT, TPOT and E2E follow.

The whole batch of prompts is one step, then every step decodes a token for each sequence. FLOP and
bytes are those of the cost model (Williams et al. 2009, "Roofline"; Pope et al. 2022, "Efficiently
Scaling Transformer Inference").
"""

import msgspec

from headrace.core.base.types import NS_PER_S
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.model import StepShape
from headrace.plan.engines import Engine, Provenance
from headrace.plan.steps import decode_shape, mean_context_tokens, prefill_shape


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step on one rank. Utilisations are of the data sheet's rates."""

    flop: float
    memory_bytes: float
    intensity_flop_per_byte: float
    flop_s: float
    memory_s: float
    link_s: float
    overhead_s: float
    step_s: float
    bound: str
    compute_utilisation: float
    memory_utilisation: float


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """`prefill` is the step of all prompts, `decode` that of the mean context."""

    model: str
    accelerator: str
    layout: str
    engine: str
    prompt_tokens: int
    output_tokens: int
    batch_seqs: int
    context_tokens: float
    ridge_flop_per_byte: float
    prefill: Phase
    decode: Phase
    ttft_s: float
    tpot_s: float
    e2e_s: float
    weight_bytes_per_gpu: float
    kv_bytes_per_gpu: float
    memory_bytes_per_gpu: float
    warnings: tuple[str, ...]
    provenance: Provenance


def compute_roofline(
    cost: DataSheetCostModel,
    *,
    prompt_tokens: int,
    output_tokens: int,
    batch_seqs: int,
    engine: Engine,
) -> Roofline:
    """TTFT is the end of the batch's prefill; E2E counts every output token as one decode step."""
    context = mean_context_tokens(prompt_tokens, output_tokens)
    prefill = measure_phase(cost, prefill_shape(batch_seqs, prompt_tokens))
    decode = measure_phase(cost, decode_shape(batch_seqs, context))
    kv_bytes = batch_seqs * cost.kv_bytes_per_gpu(prompt_tokens + output_tokens)
    return Roofline(
        model=cost.model.name,
        accelerator=cost.accelerator.name,
        layout=str(cost.layout),
        engine=engine.name,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        batch_seqs=batch_seqs,
        context_tokens=context,
        ridge_flop_per_byte=cost.accelerator.ridge_flop_per_byte(cost.weight_dtype),
        prefill=prefill,
        decode=decode,
        ttft_s=prefill.step_s,
        tpot_s=decode.step_s,
        e2e_s=prefill.step_s + output_tokens * decode.step_s,
        weight_bytes_per_gpu=cost.weight_bytes_per_gpu(),
        kv_bytes_per_gpu=kv_bytes,
        memory_bytes_per_gpu=cost.accelerator.memory_bytes,
        warnings=memory_warnings(cost, kv_bytes),
        provenance=engine.provenance(cost, concurrency=batch_seqs, context_tokens=context),
    )


def measure_phase(cost: DataSheetCostModel, shape: StepShape) -> Phase:
    work, times = cost.work(shape), cost.times(shape)
    step_s = times.total_ns / NS_PER_S
    flop_per_s = cost.accelerator.flop_per_s(cost.weight_dtype)
    return Phase(
        flop=work.flop,
        memory_bytes=work.memory_bytes,
        intensity_flop_per_byte=work.flop / work.memory_bytes,
        flop_s=times.flop_ns / NS_PER_S,
        memory_s=times.memory_ns / NS_PER_S,
        link_s=times.link_ns / NS_PER_S,
        overhead_s=times.overhead_ns / NS_PER_S,
        step_s=step_s,
        bound=times.bound,
        compute_utilisation=work.flop / flop_per_s / step_s,
        memory_utilisation=work.memory_bytes / cost.accelerator.memory_bytes_per_s / step_s,
    )


def memory_warnings(cost: DataSheetCostModel, kv_bytes: float) -> tuple[str, ...]:
    """What the arithmetic does not see: that it has to lie somewhere."""
    weights, room = cost.weight_bytes_per_gpu(), cost.accelerator.memory_bytes
    device = f"one {room / 1e9:.0f} GB {cost.accelerator.name}"
    if weights > room:
        return (f"{weights / 1e9:.0f} GB of weights do not fit {device}",)
    if weights + kv_bytes > room:
        both = f"{weights / 1e9:.0f} GB of weights and {kv_bytes / 1e9:.0f} GB of KV"
        return (f"{both} do not fit {device} together",)
    return ()
