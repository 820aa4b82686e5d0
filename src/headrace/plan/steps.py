"""The steps that capacity questions are about, and what they leave room for.

All arithmetic is the cost model's; this says which shapes stand for a workload.
"""

from typing import Final

import msgspec

from headrace.core.base.types import NS_PER_S
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.model import StepShape

MEMORY_SHARE: Final = 0.9  # of a device that weights, activations and KV may fill
ACTIVATION_BYTES: Final = 2e9  # of a device, for activations, graphs and the libraries


def prefill_shape(num_seqs: int, prompt_tokens: int) -> StepShape:
    """Whole prompts in one step; each token attends to itself and all before it."""
    pairs = num_seqs * prompt_tokens * (prompt_tokens + 1) // 2
    num_tokens = num_seqs * prompt_tokens
    return StepShape(num_tokens, num_seqs, num_seqs, pairs, num_tokens)


def decode_shape(num_seqs: int, context_tokens: float) -> StepShape:
    """One token for each sequence, which has `context_tokens` of KV on average."""
    num_kv_tokens = round(num_seqs * context_tokens)
    return StepShape(num_seqs, num_seqs, num_seqs, num_kv_tokens, num_kv_tokens)


def mean_context_tokens(prompt_tokens: float, output_tokens: float) -> float:
    """Of a sequence while it decodes."""
    return prompt_tokens + output_tokens / 2


def kv_room_bytes(cost: DataSheetCostModel) -> float:
    """What one device has left for KV beside its weights; negative where these do not fit."""
    memory_bytes = cost.accelerator.memory_bytes
    usual_bytes = memory_bytes * (1 - MEMORY_SHARE) + ACTIVATION_BYTES
    reserved_bytes = cost.efficiency.reserved_bytes or usual_bytes
    return memory_bytes - reserved_bytes - cost.weight_bytes_per_gpu()


def num_seqs_that_fit(cost: DataSheetCostModel, tokens_per_seq: float) -> int:
    """Sequences of one replica whose KV fits beside the weights."""
    return max(0, int(kv_room_bytes(cost) // cost.kv_bytes_per_gpu(tokens_per_seq)))


class ClosedLoop(msgspec.Struct, frozen=True, kw_only=True):
    """One replica under clients that each send a request when the last one is answered."""

    num_seqs: float  # that decode together
    tpot_ns: float

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_seqs / self.tpot_ns * NS_PER_S


def closed_loop(
    cost: DataSheetCostModel,
    *,
    prompt_tokens: float,
    output_tokens: float,
    concurrency: float,
    interference_share: float,
) -> ClosedLoop:
    """The mean of one replica that `concurrency` clients keep busy; with pipeline stages, of one of
    the batches that are under way in them.

    A step decodes what fits into memory of them. During the life of a request every other client
    sends one prompt; `interference_share` of its arithmetic and transfers delays the others, the
    rest falls into times when nobody decodes, as clients that start together stay together.
    """
    context = mean_context_tokens(prompt_tokens, output_tokens)
    room = num_seqs_that_fit(cost, context) / cost.layout.pp
    num_seqs = max(1.0, min(concurrency, room))
    step_ns = cost.times(decode_shape(round(num_seqs), context)).total_ns
    prompt = cost.times(prefill_shape(1, round(prompt_tokens)))
    stolen_ns = (num_seqs - 1) * (prompt.flop_ns + prompt.link_ns) / output_tokens
    return ClosedLoop(num_seqs=num_seqs, tpot_ns=step_ns + interference_share * stolen_ns)
