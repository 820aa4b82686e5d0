"""A Llama small enough for hundreds of runs in a test, with random weights of several types."""

import struct
from array import array
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from random import Random

from headrace.models.llama_files import FOLDER_NAMES, GGUF_NAMES
from support.model_files import (
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    byte_vocabulary,
    gguf_bytes,
    llama_config,
    llama_metadata,
    shard_bytes,
    tokenizer_json,
    write,
)

HIDDEN, MLP, HEADS, KV_HEADS, LAYERS, CONTEXT = 64, 128, 4, 2, 2, 512
VOCAB = len(byte_vocabulary()[0])
BLOCK_BYTES = 2 * 2 * LAYERS * KV_HEADS * (HIDDEN // HEADS) * 16
BF16 = 30

# (field of LlamaNames, GGUF type, shape) of a layer's matrices.
MATRICES = (
    ("q", Q8_0, [HIDDEN, HIDDEN]),
    ("k", F16, [HIDDEN // HEADS * KV_HEADS, HIDDEN]),
    ("v", F32, [HIDDEN // HEADS * KV_HEADS, HIDDEN]),
    ("attention_output", Q8_0, [HIDDEN, HIDDEN]),
    ("gate", Q8_0, [MLP, HIDDEN]),
    ("up", F16, [MLP, HIDDEN]),
    ("down", Q8_0, [HIDDEN, MLP]),
)

_K_TYPES = (Q4_K, Q5_K, Q6_K)
# Types in blocks of 32: how many integers there are, and whether blocks have a minimum.
_BLOCKS = {
    Q4_0: (16, False), Q4_1: (16, True), Q5_0: (32, False), Q5_1: (32, True), Q8_0: (256, False),
}  # fmt: skip

Tensor = tuple[int, Sequence[int], bytes]  # GGUF type, row-major shape, data


def write_tiny_model(path: Path, *, seed: int = 0, matrices: int | None = None) -> Path:
    """A GGUF file, whose matrices are of several types or all of the GGUF type `matrices`. In K
    types, rows are of the least width that they can have.

    Its text is noise, but as sensitive to every input as a real model's.
    """
    scale = 4 if matrices in _K_TYPES else 1
    metadata = llama_metadata(
        llama__block_count=LAYERS,
        llama__context_length=CONTEXT,
        llama__embedding_length=scale * HIDDEN,
        llama__feed_forward_length=scale * MLP,
        llama__attention__head_count=HEADS,
        llama__attention__head_count_kv=KV_HEADS,
    )
    tensors = {
        (GGUF_NAMES.layer.format(layer) if layer >= 0 else "") + f"{getattr(GGUF_NAMES, name)}"
        ".weight": tensor
        for layer, name, tensor in _tensors(Random(seed), matrices, scale=scale)
    }
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def write_tiny_folder(folder: Path, *, seed: int = 0) -> Path:
    """The same family as a folder of safetensors in bf16."""
    folder.mkdir(exist_ok=True)
    config = llama_config(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
    )
    tensors = {
        (FOLDER_NAMES.layer.format(layer) if layer >= 0 else "") + f"{getattr(FOLDER_NAMES, name)}"
        ".weight": ("BF16", shape, data)
        for layer, name, (_, shape, data) in _tensors(Random(seed), BF16, BF16)
    }
    write(folder / "config.json", config)
    write(folder / "tokenizer.json", tokenizer_json())
    write(folder / "model.safetensors", shard_bytes(tensors))
    return folder


def _tensors(
    rng: Random, matrices: int | None, vectors: int = F32, scale: int = 1
) -> Iterator[tuple[int, str, Tensor]]:
    """(layer or -1, field of LlamaNames, tensor), `scale` times as wide as the constants say."""
    hidden = scale * HIDDEN

    def norm() -> Tensor:
        return _random(rng, vectors, [hidden], 0.1, around=1.0)

    yield -1, "embedding", _random(rng, Q8_0 if matrices is None else matrices, [VOCAB, hidden], 1)
    yield -1, "norm", norm()
    for layer in range(LAYERS):
        for name, kind, sizes in MATRICES:
            shape = [scale * size for size in sizes]
            kind = kind if matrices is None else matrices
            yield layer, name, _random(rng, kind, shape, 2.0 / shape[1] ** 0.5)
        yield layer, "attention_norm", norm()
        yield layer, "mlp_norm", norm()


def _random(
    rng: Random, kind: int, shape: Sequence[int], scale: float, *, around: float = 0.0
) -> Tensor:
    count = prod(shape)
    if kind in _BLOCKS:
        blocks = (_random_block(rng, kind, scale) for _ in range(count // 32))
        return kind, shape, b"".join(blocks)
    if kind in _K_TYPES:
        blocks = (_random_k_block(rng, kind, scale) for _ in range(count // 256))
        return kind, shape, b"".join(blocks)
    values = [around + scale * rng.gauss(0.0, 1.0) for _ in range(count)]
    if kind == F16:
        return kind, shape, struct.pack(f"<{count}e", *values)
    data = array("f", values).tobytes()
    if kind == BF16:
        data = b"".join(data[i + 2 : i + 4] for i in range(0, len(data), 4))
    return kind, shape, data


def _random_block(rng: Random, kind: int, scale: float) -> bytes:
    """32 values of about the same spread in each type: a scale, in some a minimum, integers."""
    if kind == Q8_0:
        ints = (rng.randrange(-127, 128) for _ in range(32))
        return struct.pack("<e32b", 4.0 * scale / 127, *ints)
    levels, has_min = _BLOCKS[kind]
    step = scale * rng.uniform(6.4, 9.6) / levels
    floats = (
        struct.pack("<ee", step, -(levels - 1) / 2 * step) if has_min else struct.pack("<e", step)
    )
    return floats + rng.randbytes(16 if levels == 16 else 20)


def _random_k_block(rng: Random, kind: int, scale: float) -> bytes:
    """256 values of about that spread: integers, and factors of scales and minima."""
    if kind == Q6_K:
        factors = (rng.choice((-1, 1)) * rng.randrange(64, 97) for _ in range(16))
        step = scale * 8.0 / 64 / 80
        return rng.randbytes(192) + struct.pack("<16be", *factors, step)
    levels = 16 if kind == Q4_K else 32
    step = scale * 8.0 / levels / 40
    # Of eight scales and eight minima, those of the first four have factors of 36 to 43; the others
    # get the same upper bits, and any lower ones: 32 to 47.
    first = bytes(0b10_100100 | rng.randrange(8) for _ in range(8))
    return (
        struct.pack("<ee", step, (levels - 1) / 2 * step)
        + first
        + rng.randbytes(4 + (levels == 32) * 32 + 128)
    )
