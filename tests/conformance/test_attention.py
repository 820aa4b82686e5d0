"""Paged attention against a float64 definition, over ragged batches and any block table."""

from typing import Any

import numpy as np
import pytest

from headrace.core.base.plan import BlockCopy
from headrace.core.base.types import BlockId
from headrace.ops.interface import AttentionSpec, KvLayout, Rope
from support.ops_rig import attended, batch_of, compile_rows, run

NUM_BLOCKS = 24
# Scores differ where a key's bf16 rounding falls the other way for a float32 rotation: one bf16
# unit (2^-8) of one product among D, weighted by attention, on values of order one.
TOLERANCE = 8e-3


def assert_close(out: Any, exact: Any) -> None:
    np.testing.assert_allclose(out, exact, rtol=0, atol=TOLERANCE)


def rope_of(dim: int, interleaved: bool) -> Rope:
    return Rope(tuple(10_000.0 ** (-2 * i / dim) for i in range(dim // 2)), interleaved)


def rig(
    backend: Any, rows: Any, spec: AttentionSpec, interleaved: bool = True, num_layers: int = 1
) -> Any:
    rope = rope_of(spec.head_dim, interleaved)
    kv = KvLayout(num_layers, spec.num_kv_heads, spec.head_dim, NUM_BLOCKS)
    return compile_rows(
        backend, lambda ops, x, w: ops.attention(x, num_layers - 1, spec, rope), rows, kv=kv
    )


def spec_of(num_heads: int, num_kv_heads: int, dim: int) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, dim, dim**-0.5)


def rows_of(spec: AttentionSpec, num_rows: int, seed: int = 0) -> Any:
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return np.random.default_rng(seed).standard_normal((num_rows, width)).astype(np.float32)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"),
    [(1, 1, 8), (9, 3, 64), (4, 4, 16), (8, 1, 32), (6, 2, 80)],
)
def test_a_whole_prompt(
    backend: Any, interleaved: bool, num_heads: int, num_kv_heads: int, dim: int
) -> None:
    spec = spec_of(num_heads, num_kv_heads, dim)
    rows = rows_of(spec, 37)
    out = run(rig(backend, rows, spec, interleaved), batch_of((range(37), 0, [5, 2, 9])))
    assert_close(out, attended(rows, spec, rope_of(dim, interleaved)))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 70])
def test_token_by_token(backend: Any, length: int) -> None:
    spec = spec_of(3, 1, 16)
    rows = rows_of(spec, length)
    program = rig(backend, rows, spec)
    blocks = [3, 1, 4, 15, 9]
    out = [
        run(program, batch_of(([token], token, blocks[: token // 16 + 1])))[0]
        for token in range(length)
    ]
    assert_close(np.array(out), attended(rows, spec, rope_of(16, True)))


def test_a_ragged_batch_of_prompts_chunks_and_decodes(backend: Any) -> None:
    spec = spec_of(4, 2, 16)
    rows = rows_of(spec, 150)
    program = rig(backend, rows, spec)
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
    exact = [attended(rows[i : i + 50], spec, rope_of(16, True)) for i in (0, 50, 100)]
    assert_close(out, np.concatenate([exact[0][49:], exact[1][20:], exact[2]]))


def test_layers_do_not_share_a_cache(backend: Any) -> None:
    spec = spec_of(2, 1, 16)
    rows = rows_of(spec, 40)
    rope = rope_of(16, True)
    kv = KvLayout(2, 1, 16, NUM_BLOCKS)

    def forward(ops: Any, x: Any, w: Any) -> Any:
        first = ops.attention(x, 0, spec, rope)
        ops.attention(ops.add(x, x), 1, spec, rope)
        return first

    program = compile_rows(backend, forward, rows, kv=kv)
    run(program, batch_of((range(39), 0, [0, 1, 2])))
    out = run(program, batch_of(([39], 39, [0, 1, 2])))
    assert_close(out, attended(rows, spec, rope)[39:])


def test_a_copied_block_reads_as_its_source(backend: Any) -> None:
    spec = spec_of(2, 1, 16)
    rows = rows_of(spec, 40)
    program = rig(backend, rows, spec)
    run(program, batch_of((range(25), 0, [0, 1])))
    # Another sequence shares block 0 and the first 4 tokens of block 1, then goes its own way.
    program.copy_blocks([BlockCopy(BlockId(1), BlockId(8), 4)])
    own = [*range(20), *range(30, 36)]
    out = run(program, batch_of((own[20:], 20, [0, 8])))
    assert_close(out, attended(rows[own], spec, rope_of(16, True))[20:])
    # The source is as it was.
    out = run(program, batch_of((range(25, 26), 25, [0, 1])))
    assert_close(out, attended(rows[:26], spec, rope_of(16, True))[25:])


def test_large_scores_do_not_overflow(backend: Any) -> None:
    spec = spec_of(1, 1, 16)
    rows = rows_of(spec, 20) * 100
    out = run(rig(backend, rows, spec), batch_of((range(20), 0, [0, 1])))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0], attended(rows, spec, rope_of(16, True))[0], rtol=1e-2)


# ---- the same bits, whatever the schedule


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunks_do_not_change_a_bit(invariant_backend: Any, chunk: int) -> None:
    spec = spec_of(9, 3, 64)
    rows = rows_of(spec, 70)
    whole = run(rig(invariant_backend, rows, spec), batch_of((range(70), 0, range(5))))
    program = rig(invariant_backend, rows, spec)
    blocks = [9, 3, 17, 1, 8]
    parts = [
        run(program, batch_of((range(start, min(start + chunk, 70)), start, blocks)))
        for start in range(0, 70, chunk)
    ]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_neighbours_and_leftovers_do_not_change_a_bit(invariant_backend: Any) -> None:
    spec = spec_of(4, 2, 32)
    rows = rows_of(spec, 60)
    alone = run(rig(invariant_backend, rows, spec), batch_of((range(20), 0, [4, 5])))
    program = rig(invariant_backend, rows, spec)
    # Blocks 4 and 5 hold something else first, and something large.
    run(program, batch_of((range(28, 60), 0, [4, 5])))
    together = run(
        program,
        batch_of((range(30, 41), 0, [0]), (range(20), 0, [4, 5]), (range(41, 60), 0, [8, 9])),
    )
    assert together[11:31].tobytes() == alone.tobytes()
