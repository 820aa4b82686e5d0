"""Paged attention against a float64 definition, over ragged batches and any block table."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from conformance.conftest import NATIVE, make_backend
from headrace.core.base.plan import BlockCopy
from headrace.core.base.types import BlockId
from headrace.ops.interface import AttentionSpec, KvLayout, KvType, Rope
from support.ops_rig import attended, batch_of, compile_rows, run, stored

NUM_BLOCKS = 64
# Scores differ where a key's bf16 rounding falls the other way for a float32 rotation: one bf16
# unit (2^-8) of one product among D, weighted by attention, on values of order one. The levels of
# 8 bits are too far apart for that to happen to any key of these tests.
TOLERANCE = {KvType.BF16: 8e-3, KvType.INT8: 1e-4, KvType.FP8: 1e-4}


@pytest.fixture(params=list(KvType))
def kv_type(request: pytest.FixtureRequest) -> KvType:
    found: KvType = request.param
    return found


def assert_close(kv_type: KvType, out: Any, exact: Any) -> None:
    np.testing.assert_allclose(out, exact, rtol=0, atol=TOLERANCE[kv_type])


def rope_of(dim: int, interleaved: bool) -> Rope:
    return Rope(tuple(10_000.0 ** (-2 * i / dim) for i in range(dim // 2)), interleaved)


def rig(
    backend: Any, rows: Any, spec: AttentionSpec, kv_type: KvType, interleaved: bool = True
) -> Any:
    rope = rope_of(spec.head_dim, interleaved)
    kv = KvLayout(1, spec.num_kv_heads, spec.head_dim, NUM_BLOCKS, dtype=kv_type)
    return compile_rows(backend, lambda ops, x, w: ops.attention(x, 0, spec, rope), rows, kv=kv)


def spec_of(num_heads: int, num_kv_heads: int, dim: int) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, dim, dim**-0.5)


def rows_of(spec: AttentionSpec, num_rows: int, seed: int = 0) -> Any:
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return np.random.default_rng(seed).standard_normal((num_rows, width)).astype(np.float32)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"),
    [(1, 1, 2), (5, 5, 6), (3, 1, 20), (9, 3, 64), (4, 4, 16), (8, 1, 32), (6, 2, 80), (2, 1, 256)],
)
def test_a_whole_prompt(
    backend: Any, kv_type: KvType, interleaved: bool, num_heads: int, num_kv_heads: int, dim: int
) -> None:
    spec = spec_of(num_heads, num_kv_heads, dim)
    rows = rows_of(spec, 37)
    out = run(rig(backend, rows, spec, kv_type, interleaved), batch_of((range(37), 0, [5, 2, 9])))
    assert_close(kv_type, out, attended(rows, spec, rope_of(dim, interleaved), kv_type))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 70])
def test_token_by_token(backend: Any, kv_type: KvType, length: int) -> None:
    spec = spec_of(3, 1, 16)
    rows = rows_of(spec, length)
    program = rig(backend, rows, spec, kv_type)
    blocks = [3, 1, 4, 15, 9]
    out = [
        run(program, batch_of(([token], token, blocks[: token // 16 + 1])))[0]
        for token in range(length)
    ]
    assert_close(kv_type, np.array(out), attended(rows, spec, rope_of(16, True), kv_type))


def test_a_ragged_batch_of_prompts_chunks_and_decodes(backend: Any, kv_type: KvType) -> None:
    spec = spec_of(4, 2, 16)
    rows = rows_of(spec, 150)
    program = rig(backend, rows, spec, kv_type)
    # Sequence A is rows 0..49, B rows 50..99, C rows 100..149; A and B are computed in part before.
    tables = ([7, 3, 11, 0], [1, 2, 20, 23], [12, 6, 5, 19])
    run(program, batch_of((range(49), 0, tables[0]), (range(50, 70), 0, tables[1])))
    out = run(
        program,
        batch_of(
            (range(49, 50), 49, tables[0]),
            (range(70, 100), 20, tables[1]),
            (range(100, 150), 0, tables[2]),
        ),
    )
    exact = [attended(rows[i : i + 50], spec, rope_of(16, True), kv_type) for i in (0, 50, 100)]
    assert_close(kv_type, out, np.concatenate([exact[0][49:], exact[1][20:], exact[2]]))


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule(backend: Any, kv_type: KvType, seed: int) -> None:
    """Sequences of random lengths, cut at random, some of them in each step, in any order, over
    blocks that lie anywhere.
    """
    rng = np.random.default_rng(seed)
    spec = spec_of(4, 2, 16)
    lengths = rng.integers(1, 80, 4).tolist()
    rows = rows_of(spec, sum(lengths), seed)
    firsts = np.cumsum([0, *lengths]).tolist()
    blocks = rng.permutation(NUM_BLOCKS).tolist()
    tables = [[blocks.pop() for _ in range(-(-length // 16))] for length in lengths]
    program = rig(backend, rows, spec, kv_type)
    done = [0] * len(lengths)
    out = np.zeros((sum(lengths), spec.num_heads * spec.head_dim), np.float32)
    while done != lengths:
        shares = []
        for i in rng.permutation(len(lengths)).tolist():
            size = min(int(rng.choice([0, 1, 1, 7, 16, 33])), lengths[i] - done[i])
            if size:
                shares.append((i, done[i], size))
                done[i] += size
        if not shares:
            continue
        parts = run(
            program,
            batch_of(
                *(
                    (range(firsts[i] + start, firsts[i] + start + size), start, tables[i])
                    for i, start, size in shares
                )
            ),
        )
        for i, start, size in shares:
            first = firsts[i] + start
            out[first : first + size], parts = parts[:size], parts[size:]
    rope = rope_of(16, True)
    exact = [attended(rows[a:b], spec, rope, kv_type) for a, b in pairwise(firsts)]
    assert_close(kv_type, out, np.concatenate(exact))


@pytest.mark.parametrize("length", [63, 64, 65, 255, 256, 257, 600])
def test_long_contexts(backend: Any, kv_type: KvType, length: int) -> None:
    """Past every length at which a backend may cut its walk over the keys."""
    spec = spec_of(4, 2, 16)
    rows = rows_of(spec, length)
    program = rig(backend, rows, spec, kv_type)
    table = np.random.default_rng(2).permutation(NUM_BLOCKS).tolist()[: -(-length // 16)]
    prompt = run(program, batch_of((range(length - 1), 0, table)))
    last = run(program, batch_of(([length - 1], length - 1, table)))
    assert_close(
        kv_type, np.concatenate([prompt, last]), attended(rows, spec, rope_of(16, True), kv_type)
    )


def test_angles_of_far_positions(backend: Any, kv_type: KvType) -> None:
    """Frequencies so high that position 39 turns as far as position 40 000 of a real model."""
    spec = spec_of(2, 1, 8)
    rows = rows_of(spec, 40)
    rope = Rope((997.3, 31.7, 1.0, 0.01), False)
    out = run(
        compile_rows(
            backend,
            lambda ops, x, w: ops.attention(x, 0, spec, rope),
            rows,
            kv=KvLayout(1, 1, 8, NUM_BLOCKS, dtype=kv_type),
        ),
        batch_of((range(40), 0, range(3))),
    )
    assert_close(kv_type, out, attended(rows, spec, rope, kv_type))


@pytest.mark.parametrize("num_seqs", [3, 18])
def test_sequences_that_share_a_prefix(backend: Any, kv_type: KvType, num_seqs: int) -> None:
    spec = spec_of(2, 1, 16)
    rows = rows_of(spec, 32 + num_seqs)
    program = rig(backend, rows, spec, kv_type)
    run(program, batch_of((range(32), 0, [9, 4])))
    out = run(program, batch_of(*(([32 + i], 32, [9, 4, 10 + i]) for i in range(num_seqs))))
    for i in range(num_seqs):
        own = rows[[*range(32), 32 + i]]
        assert_close(kv_type, out[i], attended(own, spec, rope_of(16, True), kv_type)[-1])


def test_layers_do_not_share_a_cache(backend: Any, kv_type: KvType) -> None:
    spec = spec_of(2, 1, 16)
    rows = rows_of(spec, 40)
    rope = rope_of(16, True)
    kv = KvLayout(2, 1, 16, NUM_BLOCKS, dtype=kv_type)

    def forward(ops: Any, x: Any, w: Any) -> Any:
        first = ops.attention(x, 0, spec, rope)
        ops.attention(ops.add(x, x), 1, spec, rope)
        return first

    program = compile_rows(backend, forward, rows, kv=kv)
    run(program, batch_of((range(39), 0, [0, 1, 2])))
    out = run(program, batch_of(([39], 39, [0, 1, 2])))
    assert_close(kv_type, out, attended(rows, spec, rope, kv_type)[39:])


@pytest.mark.parametrize("num_shared", [1, 4, 15, 16])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_copied_block_reads_as_its_source(
    backend: Any, kv_type: KvType, num_shared: int, num_layers: int
) -> None:
    spec = spec_of(4, 2, 16)
    rows = rows_of(spec, 50)
    rope = rope_of(16, True)
    kv = KvLayout(num_layers, 2, 16, NUM_BLOCKS, dtype=kv_type)

    def forward(ops: Any, x: Any, w: Any) -> Any:
        return [ops.attention(x, layer, spec, rope) for layer in range(num_layers)][-1]

    program = compile_rows(backend, forward, rows, kv=kv)
    run(program, batch_of((range(32), 0, [0, 1]), (range(40, 50), 0, [8])))
    # Another sequence shares block 0 and a part of block 1, then goes its own way.
    program.copy_blocks([BlockCopy(BlockId(1), BlockId(8), num_shared)])
    own = [*range(16 + num_shared), *range(34, 40)]
    table = [0, 8, 9]
    out = run(program, batch_of((own[16 + num_shared :], 16 + num_shared, table)))
    assert_close(kv_type, out, attended(rows[own], spec, rope, kv_type)[16 + num_shared :])
    # The source is as it was.
    out = run(program, batch_of(([32], 32, [0, 1, 2])))
    assert_close(kv_type, out, attended(rows[:33], spec, rope, kv_type)[32:])


def test_copies_happen_in_order_and_leave_the_rest_of_a_block(
    backend: Any, kv_type: KvType
) -> None:
    spec = spec_of(2, 1, 16)
    rows = rows_of(spec, 50)
    program = rig(backend, rows, spec, kv_type)
    run(program, batch_of((range(16), 0, [0]), (range(16, 32), 0, [1]), (range(32, 48), 0, [2])))
    # Block 2 takes 9 tokens from block 1, which then takes 5 from block 0; a block may be its own
    # source.
    copies = ((1, 2, 9), (0, 1, 5), (0, 0, 16))
    program.copy_blocks([BlockCopy(BlockId(src), BlockId(dst), n) for src, dst, n in copies])
    out = run(program, batch_of(([48], 16, [0, 4]), ([48], 16, [1, 5]), ([48], 16, [2, 6])))
    held = (
        [*range(16)],
        [*range(5), *range(21, 32)],
        [*range(16, 25), *range(41, 48)],
    )
    for i, tokens in enumerate(held):
        assert_close(
            kv_type, out[i], attended(rows[[*tokens, 48]], spec, rope_of(16, True), kv_type)[-1]
        )


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_a_block_held_before_does_not_leak(
    backend: Any, kv_type: KvType, poison: float
) -> None:
    """Not even what is no number: nothing times zero takes it away."""
    spec = spec_of(2, 1, 16)
    rows = rows_of(spec, 60)
    rows[40:] = poison
    program = rig(backend, rows, spec, kv_type)
    program.run(batch_of((range(40, 60), 0, [0, 1])))
    out = run(program, batch_of((range(21), 0, [1, 0])))
    assert_close(kv_type, out, attended(rows[:21], spec, rope_of(16, True), kv_type))
    # Nor from a neighbour in the same step.
    out = run(program, batch_of((range(40, 43), 0, [5]), (range(21), 0, [1, 0])))
    assert_close(kv_type, out[3:], attended(rows[:21], spec, rope_of(16, True), kv_type))


def test_large_scores_do_not_overflow(backend: Any, kv_type: KvType) -> None:
    spec = spec_of(1, 1, 16)
    rows = rows_of(spec, 20) * 100
    out = run(rig(backend, rows, spec, kv_type), batch_of((range(20), 0, [0, 1])))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(
        out[0], attended(rows, spec, rope_of(16, True), kv_type)[0], rtol=1e-2
    )


# ---- what keys and values become


def alone_of(values: Any) -> Any:
    """qkv rows of one head, each to be a sequence of its own, which gives its value back."""
    return np.concatenate([np.zeros_like(values), np.zeros_like(values), values], axis=1)


def read_back(backend: Any, values: Any, kv_type: KvType) -> Any:
    spec = spec_of(1, 1, values.shape[1])
    program = rig(backend, alone_of(values), spec, kv_type)
    blocks = range(NUM_BLOCKS)
    rows = range(len(values))
    outs = [
        run(
            program,
            batch_of(*(([row], 0, [row % NUM_BLOCKS]) for row in rows[i : i + len(blocks)])),
        )
        for i in range(0, len(values), len(blocks))
    ]
    return np.concatenate(outs)


@pytest.mark.parametrize("dim", [6, 32])
@pytest.mark.parametrize("scale", [1e-38, 1e-31, 3e-30, 1e-3, 1.0, 300.0, 1e30])
def test_values_are_stored_as_their_type_defines(
    backend: Any, kv_type: KvType, dim: int, scale: float
) -> None:
    values = np.random.default_rng(3).standard_normal((64, dim)).astype(np.float32)
    values = (values * np.float32(scale)).clip(-3e38, 3e38)
    values[0] = 0
    values[1, 1:] = 0
    exact = stored(values, kv_type).astype(np.float32)
    assert (read_back(backend, values, kv_type) == exact).all()


def test_every_step_of_fp8(backend: Any) -> None:
    """All numbers that there are, those between which rounding is a tie, and what lies beside."""
    codes = np.arange(0x7F, dtype=np.int64)
    exponent, mantissa = codes >> 3, codes & 7
    normal = exponent > 0
    numbers = np.where(normal, 8 + mantissa, mantissa) * 2.0 ** (np.where(normal, exponent, 1) - 10)
    ties = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate([numbers, ties, [464, 465, 1e6, 3e38]]).astype(np.float32)
    values = np.concatenate([values, np.nextafter(ties.astype(np.float32), np.float32(0))])
    values = np.concatenate([values, -values])
    values = np.resize(values, (len(values) // 16 + 1, 16))
    out = read_back(backend, values, KvType.FP8)
    assert (out == stored(values, KvType.FP8)).all()
    assert set(numbers.tolist()) <= set(np.abs(out).ravel().tolist())


@pytest.mark.parametrize("what", ["key", "value"])
def test_what_is_no_number_is_not_hidden(backend: Any, kv_type: KvType, what: str) -> None:
    """Every token that follows one whose key or value is broken is broken, too."""
    spec = spec_of(2, 1, 16)
    rows = rows_of(spec, 80)
    rows[30, {"key": 2 * 16 + 5, "value": 3 * 16 + 5}[what]] = np.nan
    program = rig(backend, rows, spec, kv_type)
    out = run(program, batch_of((range(79), 0, range(5))))
    last = run(program, batch_of(([79], 79, range(5))))
    assert not np.isfinite(np.concatenate([out[30:], last])).all(axis=1).any()


def test_infinities_are_not_taken_for_numbers(backend: Any, kv_type: KvType) -> None:
    values = np.random.default_rng(3).standard_normal((3, 16)).astype(np.float32)
    values[1, 4:6] = np.inf, -np.inf
    out = read_back(backend, values, kv_type)
    assert not np.isfinite(out[1, 4:6]).any()
    assert (out[::2] == stored(values[::2], kv_type).astype(np.float32)).all()


# ---- the same bits, whatever the schedule


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 1), (3, 3)])
def test_threads_that_share_a_long_sequence_do_not_change_a_bit(
    name: str, kv_type: KvType, num_heads: int, num_kv_heads: int
) -> None:
    """One decode of few heads is cut along its context, where threads would wait otherwise."""
    spec = spec_of(num_heads, num_kv_heads, 16)
    rows = rows_of(spec, 600)
    blocks = np.random.default_rng(2).permutation(NUM_BLOCKS).tolist()
    table, others = blocks[:38], blocks[38:]
    outs = []
    for threads, chunk in ((1, 599), (2, 299), (3, 64)):
        program = rig(make_backend(name, threads), rows, spec, kv_type)
        for start in range(0, 599, chunk):
            program.run(batch_of((range(start, min(start + chunk, 599)), start, table)))
        outs.append(run(program, batch_of(([599], 599, table))).tobytes())
        if threads == 2:
            together = batch_of(([599], 599, table), *(([i], 0, [b]) for i, b in enumerate(others)))
            outs.append(run(program, together)[:1].tobytes())
    assert len(set(outs)) == 1


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunks_do_not_change_a_bit(invariant_backend: Any, kv_type: KvType, chunk: int) -> None:
    spec = spec_of(9, 3, 64)
    rows = rows_of(spec, 70)
    whole = run(rig(invariant_backend, rows, spec, kv_type), batch_of((range(70), 0, range(5))))
    program = rig(invariant_backend, rows, spec, kv_type)
    blocks = [9, 3, 17, 1, 8]
    parts = [
        run(program, batch_of((range(start, min(start + chunk, 70)), start, blocks)))
        for start in range(0, 70, chunk)
    ]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_neighbours_and_leftovers_do_not_change_a_bit(
    invariant_backend: Any, kv_type: KvType
) -> None:
    spec = spec_of(4, 2, 32)
    rows = rows_of(spec, 60)
    alone = run(rig(invariant_backend, rows, spec, kv_type), batch_of((range(20), 0, [4, 5])))
    program = rig(invariant_backend, rows, spec, kv_type)
    # Blocks 4 and 5 hold something else first, and something large.
    run(program, batch_of((range(28, 60), 0, [4, 5])))
    together = run(
        program,
        batch_of((range(30, 41), 0, [0]), (range(20), 0, [4, 5]), (range(41, 60), 0, [8, 9])),
    )
    assert together[11:31].tobytes() == alone.tobytes()
