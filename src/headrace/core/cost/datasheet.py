"""A cost model from a data sheet: rooflines, collectives, and the overheads of an engine.

The step time of one attention replica is

    max(FLOP / rate, bytes / bandwidth) + collectives + overheads

over the ranks of the layout. It rests on published figures and fitted shares of them, and knows no
kernel: what was measured on a device belongs into a FittedCostModel.
"""

from functools import cached_property
from typing import Final

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.cost.fitted import Link
from headrace.core.cost.formula import roof_ns
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


class Exchange(msgspec.Struct, frozen=True):
    """Collectives of one kind among `num_ranks`, in which a rank sends `sent_bytes` each time."""

    num_ranks: int
    num: int
    sent_bytes: float


class StepWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to do in a step, all pipeline stages together."""

    flop: float
    weight_bytes: float
    kv_bytes: float
    exchanges: list[Exchange]

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def link_bytes(self) -> float:
        return sum(each.num * each.sent_bytes for each in self.exchanges)


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


MAX_BATCHES: Final = 4096  # whose parts are kept


class _Batch(msgspec.Struct, frozen=True, gc=False):
    """What of a step depends on its rows alone, whatever KV they attend to."""

    is_decode: bool
    flop: float  # of all ranks, without attention
    pair_flop: float  # of attention, for each pair
    weight_bytes: float
    exchanges: tuple[Exchange, ...]
    link_ns: float
    overhead_ns: float


class DataSheetCostModel(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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
        batch = self._batch(shape)
        return StepWork(
            flop=self._flop(batch, shape),
            weight_bytes=batch.weight_bytes,
            kv_bytes=self._kv_bytes(shape),
            exchanges=list(batch.exchanges),
        )

    def times(self, shape: StepShape) -> StepTimes:
        batch = self._batch(shape)
        flop_ns, memory_ns = self._roofs_ns(batch, shape)
        return StepTimes(
            flop_ns=flop_ns,
            memory_ns=memory_ns,
            link_ns=batch.link_ns,
            overhead_ns=batch.overhead_ns,
        )

    def step_ns(self, shape: StepShape) -> Ns:
        """The total of `times`. A simulation asks for it with every step, so this calls next to
        nothing where attention reaches everywhere.
        """
        batch = self._batches.get((shape.num_tokens, shape.num_seqs, shape.num_logit_rows))
        if batch is None:
            batch = self._batch(shape)
        if self.model.window_share:
            flop_ns, memory_ns = self._roofs_ns(batch, shape)
        else:
            tp, flop_per_s, bytes_per_s, kv_elems, elem_bytes, ranks = self._constants
            flop = (batch.flop + shape.num_attention_pairs * batch.pair_flop) / tp
            kv_bytes = kv_elems * shape.num_kv_tokens * elem_bytes / ranks
            flop_ns = flop / flop_per_s * NS_PER_S
            memory_ns = (batch.weight_bytes + kv_bytes) / bytes_per_s * NS_PER_S
        roof_ns = flop_ns if flop_ns > memory_ns else memory_ns
        return Ns(round(roof_ns + batch.link_ns + batch.overhead_ns) or 1)

    def decode_ns(self, first: StepShape, num_steps: int) -> list[Ns]:
        """`step_ns` of so many steps from this one on, in which the same sequences decode."""
        step, size = first.num_seqs, num_steps * first.num_seqs
        kv = range(first.num_kv_tokens, first.num_kv_tokens + size, step)
        if self.model.window_share:
            return [self.step_ns(StepShape(step, step, step, num, num)) for num in kv]
        batch = self._batch(first)
        tp, flop_per_s, bytes_per_s, kv_elems, elem_bytes, ranks = self._constants
        return roof_ns(
            kv,
            flop=batch.flop,
            pair_flop=batch.pair_flop,
            flop_per_s=flop_per_s,
            tp=tp,
            weight_bytes=batch.weight_bytes,
            kv_elems=kv_elems,
            elem_bytes=elem_bytes,
            kv_ranks=ranks,
            bytes_per_s=bytes_per_s,
            more_ns=(batch.link_ns, batch.overhead_ns),
        )

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        """Raises InvariantError for a link that nobody described."""
        found = self.links.get(link)
        if found is None:
            raise InvariantError("no such link", link=link, known=sorted(self.links))
        return Ns(max(1, round(found.latency_ns + found.byte_ns * num_bytes)))

    def has_links(self) -> bool:
        """Whether the data sheet knows a link for everything that the layout exchanges."""
        return all(
            self.accelerator.link_bytes_per_s(each.num_ranks) > 0
            for each in self._exchanges(1)
            if each.num_ranks > 1
        )

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

    # A simulation asks for the time of one decode step after another, where only the KV grows.

    @cached_property
    def _rates(self) -> tuple[float, float]:
        """(FLOP, bytes) per second."""
        eff = self.efficiency
        return (
            self.accelerator.flop_per_s(self.weight_dtype) * eff.flop_share,
            self.accelerator.memory_bytes_per_s * eff.memory_share,
        )

    @cached_property
    def _constants(self) -> tuple[int, float, float, float, float, int]:
        return (
            self.layout.tp,
            *self._rates,
            self.model.kv_elems_per_token,
            self._kv_elem_bytes,
            self._kv_ranks,
        )

    @cached_property
    def _batches(self) -> dict[tuple[int, int, int], _Batch]:
        return {}

    def _batch(self, shape: StepShape) -> _Batch:
        key = shape.num_tokens, shape.num_seqs, shape.num_logit_rows
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= MAX_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = self._find_batch(*key)
        return batch

    def _find_batch(self, num_tokens: int, num_seqs: int, num_logit_rows: int) -> _Batch:
        model, eff, tp, ep = self.model, self.efficiency, self.layout.tp, self.layout.ep
        expert_tokens = num_tokens * (self.layout.dp if ep > 1 else 1)
        expert_ranks = ep if ep > 1 else tp
        logit_params = model.logit_params if num_logit_rows else 0.0
        read = (model.shared_params + logit_params) / tp
        read += model.experts_read(expert_tokens) * model.expert_params / expert_ranks
        routed_params = model.experts_per_token * model.expert_params
        flop = 2.0 * num_tokens * (model.shared_params + routed_params)
        flop += 2.0 * num_logit_rows * model.logit_params
        exchanges = tuple(each for each in self._exchanges(num_tokens) if each.num_ranks > 1)
        link_ns = 0.0
        for each in exchanges:
            rate = self.accelerator.link_bytes_per_s(each.num_ranks) * eff.link_share
            link_ns += each.num * (eff.collective_ns + each.sent_bytes / rate * NS_PER_S)
        is_decode = num_tokens == num_seqs
        return _Batch(
            is_decode=is_decode,
            flop=flop,
            pair_flop=model.attention_flop(1, num_tokens, is_decode=is_decode),
            weight_bytes=read * BYTES_BY_DTYPE[self.weight_dtype],
            exchanges=exchanges,
            link_ns=link_ns,
            overhead_ns=eff.step_ns + eff.layer_ns * model.num_layers + eff.seq_ns * num_seqs,
        )

    def _roofs_ns(self, batch: _Batch, shape: StepShape) -> tuple[float, float]:
        """Of arithmetic, and of memory."""
        flop_per_s, bytes_per_s = self._rates
        return (
            self._flop(batch, shape) / flop_per_s * NS_PER_S,
            (batch.weight_bytes + self._kv_bytes(shape)) / bytes_per_s * NS_PER_S,
        )

    def _flop(self, batch: _Batch, shape: StepShape) -> float:
        """Of one rank."""
        attention = self.model.attention_flop(
            shape.num_attention_pairs, shape.num_tokens, is_decode=batch.is_decode
        )
        return (batch.flop + attention) / self.layout.tp

    def _kv_bytes(self, shape: StepShape) -> float:
        kv_elems = self.model.kv_elems_read(shape.num_kv_tokens, shape.num_seqs)
        return kv_elems * self._kv_elem_bytes / self._kv_ranks

    @cached_property
    def _kv_elem_bytes(self) -> float:
        return BYTES_BY_DTYPE[self.kv_dtype]

    @cached_property
    def _kv_ranks(self) -> int:
        return min(self.layout.tp, self.model.kv_ways)

    def _exchanges(self, num_tokens: int) -> list[Exchange]:
        """What ranks tell each other in a step of one replica.

        Tensor parallelism sums the rows after attention and after the feed-forward part; a ring
        moves 2(n-1)/n of them. Whole experts replace the second sum by sending every token to its
        experts' ranks, and back. A stage hands its rows to the next.
        """
        model, layout = self.model, self.layout
        row_bytes = float(num_tokens * model.hidden * ACTIVATION_BYTES)
        num_sums = 2 * model.num_layers - (model.num_moe_layers if layout.ep > 1 else 0)
        ring = 2.0 * (layout.tp - 1) / layout.tp
        away = model.experts_per_token * (layout.ep - 1) / layout.ep / layout.tp
        return [
            Exchange(layout.tp, num_sums, row_bytes * ring),
            Exchange(layout.ep, 2 * model.num_moe_layers, row_bytes * away),
            Exchange(layout.tp * layout.pp if layout.pp > 1 else 1, layout.pp - 1, row_bytes),
        ]
