"""The Llama family: Llama, SmolLM2, Mistral and Qwen2, written once over `Ops`.

Decides what the family computes; refuses to know file formats beyond the names of tensors, and how
an operation is computed.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.models.tensors import WeightReader
from headrace.ops.interface import AttentionSpec, Ops, Rope

T = TypeVar("T")
W = TypeVar("W")


class LlamaShape(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that, with the weights, decide every output."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    qkv_biases: bool
    output_bias: bool
    context: int  # most positions; the attention window where that is shorter


class LlamaNames(msgspec.Struct, frozen=True, kw_only=True):
    """Tensor names of a file format; `layer` is filled with the layer's index. Suffixes: .weight,
    .bias.
    """

    embedding: str
    norm: str
    head: str
    layer: str
    attention_norm: str
    q: str
    k: str
    v: str
    attention_output: str
    mlp_norm: str
    gate: str
    up: str
    down: str


class Layer(msgspec.Struct, Generic[W], frozen=True):
    attention_norm: W
    qkv: tuple[W, W, W]
    qkv_biases: tuple[W, ...]  # three, or none
    attention_output: W
    output_biases: tuple[W, ...]  # one, or none
    mlp_norm: W
    gate_up: tuple[W, W]
    down: W


class Llama(Generic[T, W]):
    """A loaded model: the `Model` protocol of `ops.interface`."""

    def __init__(
        self, shape: LlamaShape, names: LlamaNames, weights: WeightReader[W], max_model_len: int
    ) -> None:
        """Take every weight in; ConfigError where the file does not hold them. `max_model_len` 0 =
        all it can.
        """
        self.shape = shape
        self.vocab_size = shape.vocab_size
        self.max_model_len = _checked_length(weights, shape.context, max_model_len)
        self.num_layers = shape.num_layers
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self._attention = AttentionSpec(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5
        )
        self._embedding = weights.matrix(
            names.embedding + ".weight", shape.vocab_size, shape.hidden_size
        )
        self._layers = [_layer(shape, names, weights, i) for i in range(shape.num_layers)]
        self._norm = weights.vector(names.norm + ".weight", shape.hidden_size)
        self._head = (
            self._embedding
            if shape.tied_embeddings
            else weights.matrix(names.head + ".weight", shape.vocab_size, shape.hidden_size)
        )
        weights.finish(ignored=_recomputed(names))
        self.digest = weights.digest(msgspec.json.encode(shape))

    def forward(self, ops: Ops[T, W]) -> T:
        """Logits [L, vocab] of the step's rows."""
        eps = self.shape.norm_eps
        x = ops.embed(self._embedding)
        for index, layer in enumerate(self._layers):
            normed = ops.rms_norm(x, layer.attention_norm, eps)
            qkv = ops.linear(normed, layer.qkv, layer.qkv_biases)
            seen = ops.attention(qkv, index, self._attention, self.shape.rope)
            x = ops.add(x, ops.linear(seen, (layer.attention_output,), layer.output_biases))
            normed = ops.rms_norm(x, layer.mlp_norm, eps)
            hidden = ops.silu_mul(ops.linear(normed, layer.gate_up))
            x = ops.add(x, ops.linear(hidden, (layer.down,)))
        rows = ops.rms_norm(ops.select_logit_rows(x), self._norm, eps)
        return ops.linear(rows, (self._head,))


def _layer(shape: LlamaShape, names: LlamaNames, weights: WeightReader[W], index: int) -> Layer[W]:
    prefix = names.layer.format(index)
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def vector(name: str, size: int, suffix: str = ".weight") -> W:
        return weights.vector(prefix + name + suffix, size)

    def matrix(name: str, rows: int, cols: int) -> W:
        return weights.matrix(prefix + name + ".weight", rows, cols)

    def bias(name: str, size: int) -> W:
        return vector(name, size, ".bias")

    return Layer(
        attention_norm=vector(names.attention_norm, shape.hidden_size),
        qkv=(
            matrix(names.q, q_size, shape.hidden_size),
            matrix(names.k, kv_size, shape.hidden_size),
            matrix(names.v, kv_size, shape.hidden_size),
        ),
        qkv_biases=(bias(names.q, q_size), bias(names.k, kv_size), bias(names.v, kv_size))
        if shape.qkv_biases
        else (),
        attention_output=matrix(names.attention_output, shape.hidden_size, q_size),
        output_biases=(bias(names.attention_output, shape.hidden_size),)
        if shape.output_bias
        else (),
        mlp_norm=vector(names.mlp_norm, shape.hidden_size),
        gate_up=(
            matrix(names.gate, shape.mlp_size, shape.hidden_size),
            matrix(names.up, shape.mlp_size, shape.hidden_size),
        ),
        down=matrix(names.down, shape.hidden_size, shape.mlp_size),
    )


def _checked_length(weights: WeightReader[W], context: int, asked: int) -> int:
    if asked > context:
        raise ConfigError(
            f"{weights.path}: the model's context is {context} tokens, {asked} are asked for",
            hint=f"the most is --max-model-len {context}",
        )
    return asked or context


def _recomputed(names: LlamaNames) -> Callable[[str], bool]:
    """Tensors that some files carry although they follow from the rest: frequencies, and a tied
    head.
    """
    return lambda name: name.endswith(".rotary_emb.inv_freq") or name == names.head + ".weight"
