"""What a step of a model has to read and to compute, counted from its forward pass.

Decides what counts as work: linear layers, attention and the keys and values. The rest (norms,
activations, embeddings) is little beside them and is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.bench.cells import Cell
from headrace.bench.limits import Work
from headrace.ops.interface import (
    AttentionSpec,
    Forward,
    KvFile,
    KvLayout,
    Program,
    Rope,
    TensorView,
    WeightType,
)
from headrace.ops.native.backend import NativeBackend

_FLOATS = (WeightType.F32, WeightType.F16, WeightType.BF16)


class KnownWeight(msgspec.Struct, frozen=True):
    """A loaded weight, and what its handle does not tell."""

    handle: Any
    type: WeightType
    rows: int
    cols: int
    num_bytes: int


class KnowingBackend:
    """A native backend that remembers what it loads."""

    def __init__(self, backend: NativeBackend) -> None:
        self.backend = backend
        self.name = backend.name
        self.batch_invariant = backend.batch_invariant
        self.arithmetic = backend.arithmetic
        self.weights: dict[int, KnownWeight] = {}  # by the identity of the handle, which is kept

    def load_weight(self, view: TensorView) -> Any:
        before = self.backend.weight_bytes()
        handle = self.backend.load_weight(view)
        num_bytes = self.backend.weight_bytes() - before
        self.weights[id(handle)] = KnownWeight(handle, view.type, view.rows, view.cols, num_bytes)
        return handle

    def weight_bytes(self) -> int:
        return self.backend.weight_bytes()

    def compile(
        self,
        forward: Forward[Any, Any],
        kv: KvLayout,
        max_tokens: int,
        kv_file: KvFile | None = None,
    ) -> Program:
        return self.backend.compile(forward, kv, max_tokens, kv_file)


def products_each(type_: WeightType, backend: NativeBackend) -> int:
    """Products of that kind for each weight and row: of inputs of twelve bits, three."""
    return 3 if backend.int12 and type_.value.startswith("q4") else 1


def product_of(type_: WeightType, backend: NativeBackend) -> str:
    """The kind of product, as in Limits, by which `backend` multiplies weights of this type."""
    if products_each(type_, backend) > 1:
        return "int8"
    if type_ not in _FLOATS and backend.int8:
        return "int4" if type_.value.startswith("q4") else "int8"
    has_bf16 = backend.bf16 and backend.bf16_products != "fma"
    return "bf16" if type_ is WeightType.BF16 and has_bf16 else "f32"


def attention_product(backend: NativeBackend) -> str:
    """The same of attention: its tiles are of many rows, and few rows wait for memory."""
    return "bf16" if backend.isa == "amx" and backend.attention_bf16 else "f32"


class Linear(msgspec.Struct, frozen=True):
    weight: KnownWeight
    num_attentions: int  # that came before


class Attention(msgspec.Struct, frozen=True):
    spec: AttentionSpec
    rope: Rope


class Census:
    """`Ops` that notes what is asked for. Handles are the widths of rows."""

    def __init__(self, weights: Mapping[int, KnownWeight]) -> None:
        self._weights = weights
        self.linears: list[Linear] = []
        self.attentions: list[Attention] = []

    def embed(self, table: Any) -> int:
        return self._weights[id(table)].cols

    def rms_norm(self, x: int, weight: Any, eps: float) -> int:
        return x

    def linear(self, x: int, weights: Sequence[Any], biases: Sequence[Any | None] = ()) -> int:
        known = [self._weights[id(weight)] for weight in weights]
        self.linears += [Linear(weight, len(self.attentions)) for weight in known]
        return sum(weight.rows for weight in known)

    def add(self, x: int, y: int) -> int:
        return x

    def silu_mul(self, gate_up: int) -> int:
        return gate_up // 2

    def attention(self, qkv: int, layer: int, spec: AttentionSpec, rope: Rope) -> int:
        self.attentions.append(Attention(spec, rope))
        return spec.num_heads * spec.head_dim

    def select_logit_rows(self, x: int) -> int:
        return x

    def work(self, cell: Cell, backend: NativeBackend) -> Work:
        """Of one step. What follows the last attention is needed for the rows with logits only."""
        operations: dict[str, int] = {}
        for linear in self.linears:
            is_late = linear.num_attentions == len(self.attentions)
            rows = cell.num_seqs if is_late else cell.num_step_tokens
            weight = linear.weight
            kind = product_of(weight.type, backend)
            count = 2 * rows * weight.rows * weight.cols * products_each(weight.type, backend)
            operations[kind] = operations.get(kind, 0) + count
        kv_bytes = 0
        for attention in self.attentions:
            spec = attention.spec
            count = 4 * cell.num_pairs * spec.num_heads * spec.head_dim
            kind = attention_product(backend)
            operations[kind] = operations.get(kind, 0) + count
            # Keys and values, two bytes each.
            kv_bytes += 4 * cell.num_kv_tokens * spec.num_kv_heads * spec.head_dim
        read = {id(linear.weight.handle): linear.weight.num_bytes for linear in self.linears}
        return Work(weight_bytes=sum(read.values()), kv_bytes=kv_bytes, operations=operations)
