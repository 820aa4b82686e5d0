"""Runs pieces of a forward pass: rows go in through `embed`, results come out as logits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from headrace.core.base.types import BlockId
from headrace.ops.interface import (
    AttentionSpec,
    KvLayout,
    KvType,
    Program,
    Rope,
    StepBatch,
    TensorView,
    WeightType,
)
from support import groups, k_quants

Array = NDArray[np.float32]
Body = Callable[[Any, Any, Mapping[str, Any]], Any]  # (ops, input rows, weight handles) -> rows

# Groups are not of GGUF.
GGUF_TYPES = {
    type: gguf.GGMLQuantizationType[type.name]
    for type in WeightType
    if type.name in gguf.GGMLQuantizationType.__members__
}


class Block(NamedTuple):
    """The smallest whole piece of a row of some type."""

    num_values: int
    num_bytes: int
    floats: tuple[tuple[Any, int, int, int], ...]  # (unsigned type, exponent bits, first byte, end)


_HALF = (np.uint16, 0x7C00)
BLOCKS = {
    WeightType.F32: Block(1, 4, ((np.uint32, 0x7F800000, 0, 4),)),
    WeightType.F16: Block(1, 2, ((*_HALF, 0, 2),)),
    WeightType.BF16: Block(1, 2, ((np.uint16, 0x7F80, 0, 2),)),
    WeightType.Q4_0: Block(32, 18, ((*_HALF, 0, 2),)),
    WeightType.Q4_1: Block(32, 20, ((*_HALF, 0, 2), (*_HALF, 2, 4))),
    WeightType.Q5_0: Block(32, 22, ((*_HALF, 0, 2),)),
    WeightType.Q5_1: Block(32, 24, ((*_HALF, 0, 2), (*_HALF, 2, 4))),
    WeightType.Q8_0: Block(32, 34, ((*_HALF, 0, 2),)),
    WeightType.Q4_G32: Block(32, 20, ((*_HALF, 0, 2),)),
    WeightType.Q4_G128: Block(128, 68, ((*_HALF, 0, 2),)),
    WeightType.Q4_K: Block(256, 144, ((*_HALF, 0, 2), (*_HALF, 2, 4))),
    WeightType.Q5_K: Block(256, 176, ((*_HALF, 0, 2), (*_HALF, 2, 4))),
    WeightType.Q6_K: Block(256, 210, ((*_HALF, 208, 210),)),
}


def whole_blocks(type: WeightType, cols: int) -> int:
    """`cols`, raised to what rows of the type can have."""
    return -(-cols // BLOCKS[type].num_values) * BLOCKS[type].num_values


def view_of(values: Array, type: WeightType = WeightType.F32) -> TensorView:
    """`values` [rows, cols] as a file would hold them in `type` (quantised by the gguf package, or
    in K types, which it cannot write, by `k_quants`).
    """
    rows, cols = values.shape
    match type:
        case WeightType.F32:
            data = values.astype(np.float32).tobytes()
        case WeightType.F16:
            data = values.astype(np.float16).tobytes()
        case WeightType.BF16:
            data = (to_bf16(values).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        case WeightType.Q4_K | WeightType.Q5_K | WeightType.Q6_K:
            data = k_quants.quantise(values, type).tobytes()
        case WeightType.Q4_G32 | WeightType.Q4_G128:
            data = groups.quantise(values, BLOCKS[type].num_values).tobytes()
        case _:
            data = gguf.quants.quantize(values.astype(np.float32), GGUF_TYPES[type]).tobytes()
    return TensorView("weight", type, rows, cols, memoryview(data))


def noise_of(type: WeightType, rows: int, cols: int, rng: np.random.Generator) -> TensorView:
    """Any bytes at all, but for floats that are not numbers: subnormal and negative scales too."""
    shape = BLOCKS[type]
    raw = rng.integers(0, 256, (rows * cols // shape.num_values, shape.num_bytes), np.uint8)
    for word, exponent, first, end in shape.floats:
        words = np.ascontiguousarray(raw[:, first:end]).view(word)
        words[(words & exponent) == exponent] ^= exponent & -exponent
        raw[:, first:end] = words.view(np.uint8)
    if type in (WeightType.Q4_G32, WeightType.Q4_G128):
        raw[:, 2:4] = groups.offsets(rng.integers(0, 16, len(raw)))
    return TensorView("weight", type, rows, cols, memoryview(raw.tobytes()))


def noise(type: WeightType, rows: int, cols: int) -> TensorView:
    return noise_of(type, rows, cols, np.random.default_rng(cols))


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def values_of(view: TensorView) -> NDArray[np.float64]:
    """What a stored weight means: exactly, for every product and sum fits float64."""
    blocks = np.frombuffer(view.data, np.uint8).reshape(-1, BLOCKS[view.type].num_bytes)

    def half(first: int) -> NDArray[np.float64]:
        return np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16).astype(float)

    def nibbles(first: int) -> NDArray[np.float64]:
        return np.hstack([blocks[:, first:] % 16, blocks[:, first:] // 16]).astype(float)

    def fifths(first: int) -> NDArray[np.float64]:
        bits = np.unpackbits(blocks[:, first : first + 4], axis=-1, bitorder="little")
        return 16 * bits.astype(float)

    match view.type:
        case WeightType.F32:
            values = blocks.view(np.float32).astype(float)
        case WeightType.F16:
            values = blocks.view(np.float16).astype(float)
        case WeightType.BF16:
            values = (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)
        case WeightType.Q4_0:
            values = half(0) * (nibbles(2) - 8)
        case WeightType.Q4_1:
            values = half(0) * nibbles(4) + half(2)
        case WeightType.Q5_0:
            values = half(0) * (nibbles(6) + fifths(2) - 16)
        case WeightType.Q5_1:
            values = half(0) * (nibbles(8) + fifths(4)) + half(2)
        case WeightType.Q4_K | WeightType.Q5_K | WeightType.Q6_K:
            values = k_quants.values_of(blocks, view.type)
        case WeightType.Q4_G32 | WeightType.Q4_G128:
            values = groups.values_of(blocks)
        case WeightType.Q8_0:
            values = half(0) * blocks[:, 2:].astype(np.int8).astype(float)
    return values.reshape(view.rows, view.cols)


def to_bf16(values: NDArray[Any]) -> Array:
    """Rounded to bfloat16, to nearest even, and back."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def compile_rows(
    backend: Any,
    body: Body,
    rows: Array,
    weights: Mapping[str, TensorView] | None = None,
    kv: KvLayout | None = None,
    max_tokens: int = 1024,
) -> Program:
    """A program whose token i enters as `rows[i]`."""
    table = backend.load_weight(view_of(rows))
    handles = {name: backend.load_weight(view) for name, view in (weights or {}).items()}

    def forward(ops: Any) -> Any:
        return ops.select_logit_rows(body(ops, ops.embed(table), handles))

    program: Program = backend.compile(forward, kv or KvLayout(1, 1, 2, 64), max_tokens)
    return program


def run(program: Program, batch: StepBatch) -> Array:
    program.run(batch)
    return np.array(program.logits(), np.float32)


def batch_of(
    *seqs: tuple[Sequence[int], int, Sequence[int]], logit_rows: Sequence[int] | None = None
) -> StepBatch:
    """A batch of (tokens, first position, block table); all rows are wanted unless told."""
    tokens = [token for seq in seqs for token in seq[0]]
    starts = [0]
    for seq in seqs:
        starts.append(starts[-1] + len(seq[0]))
    return StepBatch(
        tokens=tokens,
        token_starts=starts,
        positions=[seq[1] for seq in seqs],
        block_tables=[[BlockId(block) for block in seq[2]] for seq in seqs],
        logit_rows=range(len(tokens)) if logit_rows is None else logit_rows,
    )


def apply(
    backend: Any, body: Body, rows: Array, weights: Mapping[str, TensorView] | None = None
) -> Array:
    """`body` on all rows at once, as one sequence."""
    program = compile_rows(backend, body, rows, weights, max_tokens=max(1024, len(rows)))
    num_blocks = -(-len(rows) // 16)
    return run(program, batch_of((range(len(rows)), 0, range(num_blocks))))


def rotated(x: NDArray[Any], positions: Sequence[int], rope: Rope) -> NDArray[np.float64]:
    """The rotary embedding of x [N, heads, D] in float64, pair by pair."""
    out = x.astype(np.float64).copy()
    half = len(rope.inv_freq)
    for n, position in enumerate(positions):
        for i, frequency in enumerate(rope.inv_freq):
            a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
            cos, sin = np.cos(position * frequency), np.sin(position * frequency)
            first, second = out[n, :, a].copy(), out[n, :, b].copy()
            out[n, :, a] = first * cos - second * sin
            out[n, :, b] = first * sin + second * cos
    return out


def stored(values: NDArray[Any], type: KvType) -> NDArray[np.float64]:
    """Keys or values [..., D] as the KV pool gives them back, in float64 but for the roundings that
    are part of the type.
    """
    x = values.astype(np.float32).astype(np.float64)
    match type:
        case KvType.BF16:
            return to_bf16(values).astype(np.float64)
        case KvType.INT8:
            greatest = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32)
            with np.errstate(all="ignore"):
                levels = np.rint(x * (np.float32(127) / greatest).astype(np.float64))
                scale = (greatest / np.float32(127)).astype(np.float64)
                return np.where(greatest < 1e-30, 0.0, levels * scale)
        case KvType.FP8:
            with np.errstate(all="ignore"):
                exponent = np.maximum(np.floor(np.log2(np.abs(x))), -6)
                step = 2.0 ** (exponent - 3)
                rounded = np.clip(np.rint(x / step) * step, -448, 448)
            return np.where(np.isfinite(x), rounded, np.nan)


def attended(
    rows: Array, spec: AttentionSpec, rope: Rope, kv_type: KvType = KvType.BF16
) -> NDArray[np.float64]:
    """Causal attention over one sequence of qkv rows, query by query, with K and V as stored."""
    num_heads, num_kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    heads = rows.reshape(len(rows), -1, dim)
    positions = range(len(rows))
    q = rotated(heads[:, :num_heads], positions, rope)
    k = stored(rotated(heads[:, num_heads : num_heads + num_kv_heads], positions, rope), kv_type)
    v = stored(heads[:, num_heads + num_kv_heads :], kv_type)
    out = np.zeros((len(rows), num_heads, dim))
    for n in positions:
        for h in range(num_heads):
            group = h * num_kv_heads // num_heads
            scores = k[: n + 1, group] @ q[n, h] * spec.scale
            weights = np.exp(scores - scores.max())
            out[n, h] = weights / weights.sum() @ v[: n + 1, group]
    return out.reshape(len(rows), -1)


def linear(backend: Any, x: Any, weight: TensorView) -> Any:
    """`x` times one weight."""
    return apply(backend, lambda ops, x, w: ops.linear(x, (w["w"],)), x, {"w": weight})
