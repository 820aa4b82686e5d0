"""A Llama small enough for hundreds of runs in a test, with random weights of several types."""

import struct
from array import array
from collections.abc import Sequence
from math import prod
from pathlib import Path
from random import Random

from support.model_files import F16, F32, Q8_0, byte_vocabulary, gguf_bytes, llama_metadata

HIDDEN, MLP, HEADS, KV_HEADS, LAYERS, CONTEXT = 64, 128, 4, 2, 2, 512
VOCAB = len(byte_vocabulary()[0])
BLOCK_BYTES = 2 * 2 * LAYERS * KV_HEADS * (HIDDEN // HEADS) * 16


def write_tiny_model(path: Path, *, seed: int = 0) -> Path:
    """A GGUF file. Its text is noise, but as sensitive to every input as a real model's."""
    rng = Random(seed)
    metadata = llama_metadata(
        llama__block_count=LAYERS,
        llama__context_length=CONTEXT,
        llama__embedding_length=HIDDEN,
        llama__feed_forward_length=MLP,
        llama__attention__head_count=HEADS,
        llama__attention__head_count_kv=KV_HEADS,
    )
    kv = HIDDEN // HEADS * KV_HEADS
    tensors = {
        "token_embd.weight": _random(rng, Q8_0, [VOCAB, HIDDEN], 1.0),
        "output_norm.weight": _random(rng, F32, [HIDDEN], 0.1, around=1.0),
    }
    for layer in range(LAYERS):
        for name, kind, shape in (
            ("attn_q", Q8_0, [HIDDEN, HIDDEN]),
            ("attn_k", F16, [kv, HIDDEN]),
            ("attn_v", F32, [kv, HIDDEN]),
            ("attn_output", Q8_0, [HIDDEN, HIDDEN]),
            ("ffn_gate", Q8_0, [MLP, HIDDEN]),
            ("ffn_up", F16, [MLP, HIDDEN]),
            ("ffn_down", Q8_0, [HIDDEN, MLP]),
        ):
            scale = 2.0 / shape[1] ** 0.5
            tensors[f"blk.{layer}.{name}.weight"] = _random(rng, kind, shape, scale)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = _random(rng, F32, [HIDDEN], 0.1, around=1.0)
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def _random(
    rng: Random, kind: int, shape: Sequence[int], scale: float, *, around: float = 0.0
) -> tuple[int, Sequence[int], bytes]:
    count = prod(shape)
    values = [around + scale * rng.gauss(0.0, 1.0) for _ in range(count)]
    if kind == F32:
        return kind, shape, array("f", values).tobytes()
    if kind == F16:
        return kind, shape, struct.pack(f"<{count}e", *values)
    # Q8_0: blocks of 32 values, each a float16 scale and 32 signed bytes.
    blocks = (
        struct.pack("<e32b", 4.0 * scale / 127, *(rng.randrange(-127, 128) for _ in range(32)))
        for _ in range(count // 32)
    )
    return kind, shape, b"".join(blocks)
