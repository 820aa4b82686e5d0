"""A cost model from a data sheet: rooflines, collectives, and the overheads of an engine.

The step time of one attention replica is

    max(FLOP / rate, bytes / bandwidth) + collectives + overheads

over the ranks of the layout. It rests on published figures and fitted shares of them, and knows no
kernel: what was measured on a device belongs into a FittedCostModel.
"""

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.cost.fitted import Link
from headrace.core.cost.hardware import (
    ACTIVATION_BYTES,
    BYTES_BY_DTYPE,
    IDEAL,
    Accelerator,
    Efficiency,
    Layout,
    ModelShape,
)
from headrace.core.cost.model import StepShape


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to do in a step, all pipeline stages together."""

    flop: float
    weight_bytes: float
    kv_bytes: float
    link_bytes: float  # that leave the rank
    num_collectives: int

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's time goes. Arithmetic and memory overlap, the rest adds up."""

    flop_ns: float
    memory_ns: float
    link_ns: float
    overhead_ns: float

    @property
    def total_ns(self) -> float:
        return max(self.flop_ns, self.memory_ns) + self.link_ns + self.overhead_ns

    @property
    def bound(self) -> str:
        """The largest part."""
        parts = {
            "compute": self.flop_ns,
            "memory": self.memory_ns,
            "links": self.link_ns,
            "overhead": self.overhead_ns,
        }
        return max(parts, key=parts.__getitem__)


class DataSheetCostModel(msgspec.Struct, frozen=True, kw_only=True):
    """The CostModel of one attention replica of a layout (a worker with `tp · pp` devices).

    With `pp` > 1, `step_ns` is the way of one batch through all stages; as many batches are under
    way at once. Routed experts are taken to be chosen equally often; where they lie whole on `ep`
    ranks, all replicas are taken to run steps of the same shape.
    """

    model: ModelShape
    accelerator: Accelerator
    layout: Layout = Layout()
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    efficiency: Efficiency = IDEAL
    links: dict[str, Link] = {}

    def work(self, shape: StepShape) -> StepWork:
        model, tp, ep = self.model, self.layout.tp, self.layout.ep
        num_tokens = shape.num_tokens
        weight_bytes = BYTES_BY_DTYPE[self.weight_dtype]
        expert_tokens = num_tokens * (self.layout.dp if ep > 1 else 1)
        expert_ranks = ep if ep > 1 else tp
        logit_params = model.logit_params if shape.num_logit_rows else 0.0
        read = (model.shared_params + logit_params) / tp
        read += model.experts_read(expert_tokens) * model.expert_params / expert_ranks
        routed_params = model.experts_per_token * model.expert_params
        flop = 2.0 * num_tokens * (model.shared_params + routed_params)
        flop += 2.0 * shape.num_logit_rows * model.logit_params
        is_decode = num_tokens == shape.num_seqs
        flop += model.attention_flop(shape.num_attention_pairs, num_tokens, is_decode=is_decode)
        kv_elems = model.kv_elems_read(shape.num_kv_tokens, shape.num_seqs)
        link_bytes, num_collectives = self._exchange(num_tokens)
        return StepWork(
            flop=flop / tp,
            weight_bytes=read * weight_bytes,
            kv_bytes=kv_elems * BYTES_BY_DTYPE[self.kv_dtype] / min(tp, model.kv_ways),
            link_bytes=link_bytes,
            num_collectives=num_collectives,
        )

    def times(self, shape: StepShape) -> StepTimes:
        work, eff = self.work(shape), self.efficiency
        link_ns = work.num_collectives * eff.collective_ns
        if work.link_bytes:
            layout = self.layout
            ranks = layout.tp * layout.pp if layout.ep == 1 else layout.num_gpus
            rate = self.accelerator.link_bytes_per_s(ranks) * eff.link_share
            link_ns += work.link_bytes / rate * NS_PER_S
        flop_per_s = self.accelerator.flop_per_s(self.weight_dtype) * eff.flop_share
        bytes_per_s = self.accelerator.memory_bytes_per_s * eff.memory_share
        return StepTimes(
            flop_ns=work.flop / flop_per_s * NS_PER_S,
            memory_ns=work.memory_bytes / bytes_per_s * NS_PER_S,
            link_ns=link_ns,
            overhead_ns=eff.step_ns
            + eff.layer_ns * self.model.num_layers
            + eff.seq_ns * shape.num_seqs,
        )

    def step_ns(self, shape: StepShape) -> Ns:
        return Ns(max(1, round(self.times(shape).total_ns)))

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        """Raises InvariantError for a link that nobody described."""
        found = self.links.get(link)
        if found is None:
            raise InvariantError("no such link", link=link, known=sorted(self.links))
        return Ns(max(1, round(found.latency_ns + found.byte_ns * num_bytes)))

    def weight_bytes_per_gpu(self) -> float:
        """Weights that one rank of one stage stores."""
        model, layout = self.model, self.layout
        routed = model.num_experts * model.expert_params
        ranks = layout.ep if layout.ep > 1 else layout.tp
        stored = (model.num_params - routed) / layout.tp + routed / ranks
        return stored / layout.pp * BYTES_BY_DTYPE[self.weight_dtype]

    def kv_bytes_per_gpu(self, num_tokens: float) -> float:
        """KV that one rank of one stage stores for a sequence of `num_tokens`."""
        ways = min(self.layout.tp, self.model.kv_ways) * self.layout.pp
        return self.model.kv_elems_held(num_tokens) * BYTES_BY_DTYPE[self.kv_dtype] / ways

    def _exchange(self, num_tokens: int) -> tuple[float, int]:
        """Bytes that leave a rank in a step, and collectives.

        Tensor parallelism sums the rows after attention and after the feed-forward part; a ring
        moves 2(n-1)/n of them. Whole experts replace the second sum by sending every token to its
        experts' ranks, and back. A stage hands its rows to the next.
        """
        model, layout = self.model, self.layout
        row_bytes = num_tokens * model.hidden * ACTIVATION_BYTES
        num_sums = num_sends = 0
        if layout.tp > 1:
            num_sums = 2 * model.num_layers - (model.num_moe_layers if layout.ep > 1 else 0)
        if layout.ep > 1:
            num_sends = 2 * model.num_moe_layers
        ring = 2.0 * (layout.tp - 1) / layout.tp
        away = model.experts_per_token * (layout.ep - 1) / layout.ep / layout.tp
        sent = row_bytes * (num_sums * ring + num_sends * away + (layout.pp - 1))
        return sent, num_sums + num_sends + layout.pp - 1
