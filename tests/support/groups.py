"""AWQ and GPTQ checkpoints, and the blocks they become, written and read from the definitions.

Sources: AutoAWQ's `WQLinear_GEMM`; AutoGPTQ's and GPTQModel's `QuantLinear`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.model_files import llama_config, shard_bytes, tokenizer_json, write

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]
Halves = NDArray[np.float16] | NDArray[np.float32]
Stored = dict[str, tuple[str, Sequence[int], bytes]]  # tensors as `shard_bytes` takes them

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of a word, from its lowest bits on


# ---- blocks of WeightType.Q4_G32 and Q4_G128


def offsets(zeros: Any) -> NDArray[np.uint8]:
    """-zero as float16, two bytes each."""
    return (0.0 - np.asarray(zeros)).astype(np.float16)[:, None].view(np.uint8)


def values_of(blocks: NDArray[np.uint8]) -> Doubles:
    """[blocks, values]"""
    scale, offset = (
        np.ascontiguousarray(blocks[:, i : i + 2]).view(np.float16).astype(float) for i in (0, 2)
    )
    nibbles = blocks[:, 4:].reshape(len(blocks), -1, 16)
    q = np.concatenate([nibbles % 16, nibbles // 16], axis=-1).reshape(len(blocks), -1)
    values: Doubles = scale * (q + offset)
    return values


def quantise(values: NDArray[Any], size: int) -> NDArray[np.uint8]:
    """Blocks of `size`: the range of each, with zero in it, in fifteen steps."""
    x = values.astype(float).reshape(-1, size)
    low, high = x.min(-1, keepdims=True).clip(max=0), x.max(-1, keepdims=True).clip(min=0)
    scale = ((high - low) / 15).astype(np.float16)
    step = np.where(scale > 0, scale.astype(float), 1.0)
    zero = np.rint(-low / step).clip(0, 15)
    q = np.rint(x / step + zero).clip(0, 15).astype(np.uint8).reshape(len(x), -1, 2, 16)
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(len(x), -1)
    return np.hstack([scale.view(np.uint8), offsets(zero[:, 0]), nibbles])


# ---- checkpoints


def words(values: Ints, bits: int, order: Sequence[int] | None = None) -> NDArray[np.uint32]:
    """The last axis, packed into words of 32 bits."""
    per_word = 32 // bits
    parts = values.astype(np.uint32).reshape(*values.shape[:-1], -1, per_word)
    packed = np.zeros(parts.shape[:-1], np.uint32)
    for place, member in enumerate(order or range(per_word)):
        packed |= parts[..., member] << np.uint32(bits * place)
    return packed


def groups_of_inputs(cols: int, quantization: Mapping[str, Any]) -> Ints:
    """The group of each input: with `desc_act` they are shuffled, by the order of activations that
    matrices of as many inputs have in common.
    """
    size = quantization["group_size"] if quantization["group_size"] > 0 else cols
    groups = np.arange(cols) // size
    if quantization.get("desc_act", False):
        np.random.default_rng(cols).shuffle(groups)
    return groups


def grouped_tensors(
    name: str, q: Ints, zeros: Ints, scales: Halves, quantization: Mapping[str, Any]
) -> Stored:
    """The tensors of a matrix: q [inputs, outputs], zeros and scales [groups, outputs]. Scales in
    float32 are written as bfloat16.
    """
    bits, method = quantization["bits"], quantization["quant_method"]
    if method == "awq":
        qweight, qzeros = words(q, bits, AWQ_ORDER), words(zeros, bits, AWQ_ORDER)
    else:
        is_v1 = quantization.get("checkpoint_format", "gptq") == "gptq"
        qweight = words(q.T, bits).T
        qzeros = words((zeros - is_v1) % (1 << bits), bits)
    types = {"scales": "F16"}
    arrays: dict[str, NDArray[Any]] = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    if scales.dtype == np.float32:
        types["scales"] = "BF16"
        arrays["scales"] = (scales.view(np.uint32) >> 16).astype(np.uint16)
    if method == "gptq":
        arrays["g_idx"] = groups_of_inputs(len(q), quantization).astype(np.int32)
    return {
        f"{name}.{part}": (
            types.get(part, "I32"),
            array.shape,
            np.ascontiguousarray(array).tobytes(),
        )
        for part, array in arrays.items()
    }


def random_matrix(
    rng: np.random.Generator, rows: int, cols: int, quantization: Mapping[str, Any]
) -> tuple[Ints, Ints, Halves, Doubles]:
    """(q, zeros, scales, what they mean [rows, cols]). `torch_dtype` says the type of scales."""
    bits, size = quantization["bits"], quantization["group_size"]
    size = cols if size < 0 else size
    num_groups = -(-cols // size)
    q = rng.integers(0, 1 << bits, (cols, rows))
    middle = 1 << (bits - 1)
    zeros = np.full((num_groups, rows), middle)
    if not quantization.get("sym", False):
        zeros = rng.integers(0, 1 << bits, (num_groups, rows))
    scales: Halves = (rng.uniform(0.02, 0.2, (num_groups, rows)) / middle).astype(np.float16)
    if quantization.get("torch_dtype") == "bfloat16":
        bits = scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        scales = bits.view(np.float32)
    group_of = groups_of_inputs(cols, quantization)
    values = (q - zeros[group_of]) * scales.astype(float)[group_of]
    return q, zeros, scales, values.T


def write_pair(
    folder: Path, quantization: Mapping[str, Any], sizes: Mapping[str, int], seed: int = 0
) -> tuple[Path, Path]:
    """A random Llama whose layers are in groups, and the same with plain float32 weights."""
    rng = np.random.default_rng(seed)
    config: dict[str, Any] = llama_config(**sizes)
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    grouped: Stored = {}
    plain: Stored = {}

    def floats(name: str, values: Doubles) -> Stored:
        return {name: ("F32", values.shape, values.astype(np.float32).tobytes())}

    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        for part, (rows, cols) in shapes.items():
            name = f"model.layers.{layer}.{part}"
            q, zeros, scales, values = random_matrix(rng, rows, cols, quantization)
            grouped |= grouped_tensors(name, q, zeros, scales, quantization)
            plain |= floats(f"{name}.weight", values)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shared = floats(f"model.layers.{layer}.{norm}.weight", rng.uniform(0.5, 1.5, hidden))
            grouped |= shared
            plain |= shared
    shared = floats("model.embed_tokens.weight", rng.normal(size=(vocab, hidden)))
    shared |= floats("model.norm.weight", rng.uniform(0.5, 1.5, hidden))
    stated = {"quantization_config": quantization}
    return (
        write_model(folder / "grouped", config | stated, grouped | shared),
        write_model(folder / "plain", config, plain | shared),
    )


def write_model(folder: Path, config: dict[str, Any], tensors: Stored) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", config)
    write(folder / "tokenizer.json", tokenizer_json())
    write(folder / "model.safetensors", shard_bytes(tensors))
    return folder
