"""What requests ask of a worker in seconds, before any waits for another, and their limits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec

from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.model import CostModel, StepShape
from headrace.plan.steps import decode_shape, mean_context_tokens, prefill_shape


class Latencies(msgspec.Struct, frozen=True):
    """Means over requests at one load."""

    ttft_s: float
    tpot_s: float
    decode_seqs: float  # that decode together on one worker


class Split(msgspec.Struct, frozen=True):
    """Workers of each kind; parts of one are a model's, not a machine's."""

    prefill_workers: float
    decode_workers: float


@dataclass(frozen=True, kw_only=True)
class ServiceTimes:
    """One workload on `num_workers` equal workers. Derived figures are computed once."""

    cost: CostModel
    num_workers: int
    prompt_tokens: int
    output_tokens: int
    design_batch_seqs: int  # sequences in a decode step where a model does not find them itself
    chunk_tokens: int  # of a step that mixes prompts and decoding
    kv_link_bytes_per_s: float | None = None  # hand-off of KV; None = takes no time
    kv_copy_s: float | None = None  # hand-off of a prompt's KV, where it was measured

    def bind(
        self, model: Callable[["ServiceTimes", float], Latencies | None]
    ) -> Callable[[float], Latencies | None]:
        return partial(model, self)

    @cached_property
    def prefill_s(self) -> float:
        """A whole prompt in a step of its own."""
        return self._seconds(prefill_shape(1, self.prompt_tokens))

    @cached_property
    def context_tokens(self) -> float:
        return mean_context_tokens(self.prompt_tokens, self.output_tokens)

    def decode_step_s(self, num_seqs: int) -> float:
        return self._seconds(decode_shape(num_seqs, self.context_tokens))

    @cached_property
    def design_step_s(self) -> float:
        return self.decode_step_s(self.design_batch_seqs)

    @cached_property
    def decode_s(self) -> float:
        """A request's part of its decode steps at the design batch."""
        return self.output_tokens * self.design_step_s / self.design_batch_seqs

    @cached_property
    def capacity_per_s(self) -> float:
        return self.num_workers / (self.prefill_s + self.decode_s)

    @cached_property
    def balanced_split(self) -> Split:
        """Workers in proportion to the work of each kind."""
        prefill = self.num_workers * self.prefill_s / (self.prefill_s + self.decode_s)
        return Split(prefill, self.num_workers - prefill)

    @cached_property
    def step_seq_s(self) -> float:
        """What one more sequence adds to a decode step: the slope up to the design batch."""
        most = max(2, self.design_batch_seqs)
        return (self.decode_step_s(most) - self.decode_step_s(1)) / (most - 1)

    @cached_property
    def step_base_s(self) -> float:
        """A decode step of nobody: the line through those of one sequence and of the design."""
        return self.decode_step_s(1) - self.step_seq_s

    def mixed_step_s(self, num_decoding: int) -> float:
        """A step filled up to the chunk with tokens from the middle of a prompt."""
        num_prompt_tokens = max(1, self.chunk_tokens - num_decoding)
        pairs = num_prompt_tokens * self.prompt_tokens // 2
        prompt = StepShape(num_prompt_tokens, 1, 0, pairs, self.prompt_tokens // 2)
        return self._seconds(prompt + decode_shape(num_decoding, self.context_tokens))

    @cached_property
    def kv_transfer_bytes(self) -> float:
        """KV of a prompt, from all ranks of a worker together; 0 where only a data sheet knows."""
        if not isinstance(self.cost, DataSheetCostModel):
            return 0.0
        layout = self.cost.layout
        return self.cost.kv_bytes_per_gpu(self.prompt_tokens) * layout.tp * layout.pp

    @cached_property
    def kv_transfer_s(self) -> float:
        if self.kv_copy_s is not None:
            return self.kv_copy_s
        rate = self.kv_link_bytes_per_s
        return self.kv_transfer_bytes / rate if rate else 0.0

    def _seconds(self, shape: StepShape) -> float:
        return self.cost.step_ns(shape) / NS_PER_S


def find_excess(slo: Slo, ttft_s: float, tpot_s: float, output_tokens: int) -> str:
    """The first stated limit that means exceed; "" = none. E2E counts a step for each token.

    A limit on ITL is about single gaps, of which means know nothing.
    """
    limits = {
        "ttft": (slo.ttft_ms, ttft_s),
        "tpot": (slo.tpot_ms, tpot_s),
        "e2e": (slo.e2e_ms, ttft_s + output_tokens * tpot_s),
    }
    for name, (limit_ms, actual_s) in limits.items():
        if limit_ms is not None and actual_s * 1000 > limit_ms:
            return name
    return ""
