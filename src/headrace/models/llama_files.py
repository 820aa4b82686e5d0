"""What GGUF metadata and config.json say about a model of the Llama family."""

from collections.abc import Mapping
from pathlib import Path

from headrace.models import rope
from headrace.models.facts import Facts
from headrace.models.llama import LlamaNames, LlamaShape
from headrace.models.tensors import WeightReader
from headrace.ops.interface import Rope

GGUF_NAMES = LlamaNames(
    embedding="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    attention_output="attn_output",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)

FOLDER_NAMES = LlamaNames(
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

_ROPE_FACTORS = "rope_freqs.weight"

# Far above any model, and small enough that a damaged number cannot ask for much memory.
_MAX_HEAD_DIM = 1024
_MAX_LAYERS = 1024


def shape_from_gguf(
    path: Path, metadata: Mapping[str, object], architecture: str, weights: WeightReader[object]
) -> LlamaShape:
    """Converters of architecture "llama" reorder the rows of q and k so that the pairs of a head
    interleave; those of "qwen2" leave them as they are.
    """
    facts = Facts(path, metadata)
    if facts.integer("split.count", 1) != 1:
        raise facts.refuse("one part of a split file", hint="merge the parts into one file")
    prefix = architecture + "."
    num_heads = facts.integer(prefix + "attention.head_count")
    hidden_size = facts.integer(prefix + "embedding_length")
    head_dim = _head_dim(
        facts, facts.integer(prefix + "attention.key_length", 0, low=0), hidden_size, num_heads
    )
    if facts.integer(prefix + "attention.value_length", head_dim) != head_dim:
        raise facts.refuse("keys and values of different sizes are not supported")
    inv_freq = rope.from_gguf(facts, architecture, head_dim)
    if _ROPE_FACTORS in weights:
        inv_freq = rope.divided(inv_freq, weights.floats(_ROPE_FACTORS, head_dim // 2))
    context = facts.integer(prefix + "context_length")
    window = facts.integer(prefix + "attention.sliding_window", 0, low=0)
    first_layer = GGUF_NAMES.layer.format(0)
    return LlamaShape(
        vocab_size=weights.shape(GGUF_NAMES.embedding + ".weight")[0],
        hidden_size=hidden_size,
        mlp_size=facts.integer(prefix + "feed_forward_length"),
        num_layers=facts.integer(prefix + "block_count", high=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(
            facts, facts.integer(prefix + "attention.head_count_kv", num_heads), num_heads
        ),
        head_dim=head_dim,
        norm_eps=facts.number(prefix + "attention.layer_norm_rms_epsilon"),
        rope=Rope(inv_freq, interleaved=architecture != "qwen2"),
        tied_embeddings=GGUF_NAMES.head + ".weight" not in weights,
        qkv_biases=architecture == "qwen2" or f"{first_layer}{GGUF_NAMES.q}.bias" in weights,
        output_bias=f"{first_layer}{GGUF_NAMES.attention_output}.bias" in weights,
        context=min(context, window or context),
    )


def shape_from_config(path: Path, values: Mapping[str, object], architecture: str) -> LlamaShape:
    config = Facts(path, values)
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise config.refuse(f"activation {activation!r} is not supported; only silu is")
    if config.flag("mlp_bias", False):
        raise config.refuse("biases in the MLP are not supported")
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = _head_dim(config, config.integer("head_dim", 0, low=0), hidden_size, num_heads)
    context = config.integer("max_position_embeddings")
    # Qwen2 states a window that it does not use.
    window = 0
    if config.flag("use_sliding_window", architecture == "mistral"):
        window = config.integer("sliding_window", 0, low=0)
    attention_bias = config.flag("attention_bias", False)
    return LlamaShape(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        mlp_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers", high=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, config.integer("num_key_value_heads", num_heads), num_heads),
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=Rope(rope.from_config(config, head_dim), interleaved=False),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qkv_biases=architecture == "qwen2" or attention_bias,
        output_bias=attention_bias,
        context=min(context, window or context),
    )


def _head_dim(facts: Facts, stated: int, hidden_size: int, num_heads: int) -> int:
    """Heads may be of another size than hidden size / heads, where the file says so."""
    head_dim = stated or hidden_size // num_heads
    if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
        raise facts.refuse(
            f"heads of {head_dim} values; an even number up to {_MAX_HEAD_DIM} is needed"
        )
    return head_dim


def _kv_heads(facts: Facts, num_kv_heads: int, num_heads: int) -> int:
    if num_heads % num_kv_heads:
        raise facts.refuse(f"{num_heads} heads do not share {num_kv_heads} KV heads evenly")
    return num_kv_heads
