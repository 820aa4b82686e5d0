"""Attention, exact and in bf16: near the definition, and the same bits on every instruction set,
with any number of threads, in any chunks and in any company.
"""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.ops.interface import AttentionSpec, KvLayout, KvType, Rope
from headrace.ops.native import _native
from headrace.ops.native.backend import NativeBackend
from support.ops_rig import (
    attended,
    batch_of,
    compile_rows,
    normal,
    run,
)

ISAS = _native.usable_isas()
EXACT, ROUNDED = "f32", "bf16"  # products
# Beyond a query's and a weight's rounding, each by up to 2^-9 of itself, on values of order one.
ROUNDING = {EXACT: 0.0, ROUNDED: 8e-3}


def backend_of(products: str, isa: str = "auto", threads: int = 1) -> NativeBackend:
    return NativeBackend(threads=threads, isa=isa, activations="f32", attention=products)


@pytest.fixture(scope="module", params=[EXACT, ROUNDED])
def products(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


# ---- more than one segment of 256 tokens

LONG = 600
SPEC = AttentionSpec(4, 2, 24, 24**-0.5)  # a head size that is no multiple of 16
ROPE = Rope(tuple(100.0 ** (-i / 12) for i in range(12)), True)
QKV = normal(LONG, (4 + 2 * 2) * 24)
TABLE = [int(block) for block in np.random.default_rng(5).permutation(64)[: LONG // 16 + 1]]


def attention(kv_type: KvType, products: str, isa: str = "auto", threads: int = 1) -> Any:
    return compile_rows(
        backend_of(products, isa, threads),
        lambda ops, x, w: ops.attention(x, 0, SPEC, ROPE),
        QKV,
        kv=KvLayout(1, 2, 24, 400, dtype=kv_type),
    )


@pytest.fixture(scope="module", params=list(KvType))
def kv_type(request: pytest.FixtureRequest) -> KvType:
    found: KvType = request.param
    return found


@pytest.fixture(scope="module")
def whole(kv_type: KvType, products: str) -> Any:
    return run(attention(kv_type, products), batch_of((range(LONG), 0, TABLE)))


def test_a_long_prompt(whole: Any, kv_type: KvType, products: str) -> None:
    exact = attended(QKV, SPEC, ROPE, kv_type)
    np.testing.assert_allclose(whole, exact, rtol=0, atol=8e-3 + ROUNDING[products])


def test_values_weigh_as_exactly_as_floats_can(kv_type: KvType) -> None:
    """Rotations by nothing, so that keys round the same way here and there."""
    still = Rope((0.0,) * 12, False)
    program = compile_rows(
        backend_of(EXACT),
        lambda ops, x, w: ops.attention(x, 0, SPEC, still),
        QKV,
        kv=KvLayout(1, 2, 24, 64, dtype=kv_type),
    )
    out = run(program, batch_of((range(LONG), 0, TABLE)))
    np.testing.assert_allclose(out, attended(QKV, SPEC, still, kv_type), rtol=0, atol=3e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("tail", [1, 3])
def test_one_token_over_many_segments(
    whole: Any, kv_type: KvType, products: str, isa: str, threads: int, tail: int
) -> None:
    """With several threads, a lone query's segments are computed apart and merged."""
    program = attention(kv_type, products, isa, threads)
    start = LONG - tail
    run(program, batch_of((range(start), 0, TABLE), logit_rows=[0]))
    out = run(program, batch_of((range(start, LONG), start, TABLE)))
    assert out.tobytes() == whole[start:].tobytes()


@pytest.mark.parametrize("border", [15, 16, 17, 63, 64, 65, 255, 256, 257, 319, 512])
def test_chunks_that_end_at_borders(
    whole: Any, kv_type: KvType, products: str, border: int
) -> None:
    program = attention(kv_type, products, threads=2)
    first = run(program, batch_of((range(border), 0, TABLE)))
    rest = run(program, batch_of((range(border, LONG), border, TABLE)))
    assert np.concatenate([first, rest]).tobytes() == whole.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_new", [1, 3])
def test_sequences_that_share_blocks_read_them_together(
    whole: Any, kv_type: KvType, products: str, isa: str, threads: int, num_new: int
) -> None:
    """Some hold two whole segments in common, some one, one sequence none, and one is shorter."""
    program = attention(kv_type, products, isa, threads)
    ends = [(600, 32), (598, 32), (540, 32), (530, 16), (515, 16), (511, 0), (300, 16), (90, 0)]
    seqs: list[tuple[range, int, list[int]]] = []
    free = iter(range(64, 400))
    for end, num_shared in ends:
        table = TABLE[:num_shared] + [next(free) for _ in range(38 - num_shared)]
        written = num_shared * 16
        if not seqs:
            run(program, batch_of((range(512), 0, TABLE), logit_rows=[0]))
        if written < end - num_new:
            rest = range(written, end - num_new)
            run(program, batch_of((rest, written, table), logit_rows=[0]))
        seqs.append((range(end - num_new, end), end - num_new, table))
    together = run(program, batch_of(*seqs))
    expected = np.concatenate([whole[tokens.start : tokens.stop] for tokens, *_ in seqs])
    assert together.tobytes() == expected.tobytes()


def test_more_heads_in_a_group_than_rows_in_a_tile(products: str) -> None:
    spec = AttentionSpec(50, 1, 8, 8**-0.5)
    rope = Rope((1.0, 0.1, 0.01, 0.001), False)
    rows = normal(9, 52 * 8)
    program = compile_rows(
        backend_of(products, threads=2),
        lambda ops, x, w: ops.attention(x, 0, spec, rope),
        rows,
        kv=KvLayout(1, 1, 8, 4),
    )
    out = run(program, batch_of((range(9), 0, [2])))
    np.testing.assert_allclose(
        out, attended(rows, spec, rope), rtol=0, atol=8e-3 + ROUNDING[products]
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("garbage", [np.inf, np.nan])
def test_what_lies_behind_a_query_does_not_reach_it(
    kv_type: KvType, products: str, isa: str, garbage: float
) -> None:
    """Not even as 0 * infinity: later tokens are broken, the results of earlier ones are not."""
    rows = QKV[:40].copy()
    rows[30:] = garbage

    def build(values: Any) -> Any:
        return compile_rows(
            backend_of(products, isa),
            lambda ops, x, w: ops.attention(x, 0, SPEC, ROPE),
            values,
            kv=KvLayout(1, 2, 24, 64, dtype=kv_type),
        )

    with np.errstate(all="ignore"):
        broken = run(build(rows), batch_of((range(40), 0, TABLE)))[:30]
    assert broken.tobytes() == run(build(QKV[:40]), batch_of((range(40), 0, TABLE)))[:30].tobytes()


# A pool whose file ends behind the blocks that are used: whoever reads on is killed.
AT_THE_END = """
import os
from math import gcd
import numpy as np
from headrace.ops.interface import AttentionSpec, KvFile, KvLayout, KvType, Rope
from headrace.ops.native.backend import NativeBackend, usable_isas
from support.ops_rig import batch_of, run, view_of

page = os.sysconf("SC_PAGESIZE")
cases = [(i, t, d, a) for i in usable_isas() for t in KvType for d in (2, 24, 72) for a in (0, 1)]
for isa, kv_type, dim, is_exact in cases:
    print(isa, kv_type, dim, is_exact, flush=True)
    block = KvLayout(1, 1, dim, 1, dtype=kv_type).block_bytes
    used = page // gcd(page, block)
    layout = KvLayout(1, 1, dim, 2 * used, dtype=kv_type)
    file = os.memfd_create("pool")
    os.ftruncate(file, used * block)
    backend = NativeBackend(1, isa, "f32" if is_exact else "bf16")
    spec, rope = AttentionSpec(9, 1, dim, 1.0), Rope((0.1,) * (dim // 2), False)
    table = backend.load_weight(view_of(np.ones((48, 11 * dim), np.float32)))
    program = backend.compile(
        lambda ops: ops.select_logit_rows(ops.attention(ops.embed(table), 0, spec, rope)),
        layout, 48, KvFile(file, 0),
    )
    blocks = [(used - 3 + i) % used for i in range(3)]
    run(program, batch_of((range(47), 0, blocks)))
    run(program, batch_of((range(1), 47, blocks)))
    os.close(file)
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_nothing_is_read_behind_a_pool() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]


# ---- on every instruction set


def numbers_of_any_size(rng: np.random.Generator, num_rows: int, width: int) -> Any:
    """Of every exponent, subnormal ones too, but for those whose products overflow."""
    bits = rng.integers(0, 1 << 32, (num_rows, width), np.uint32)
    exponents = rng.choice([int(rng.integers(0, 4)), 60, 110, 126, 140], (num_rows, width))
    return ((bits & 0x807FFFFF) | (exponents.astype(np.uint32) << 23)).view(np.float32)


@pytest.mark.parametrize("is_wild", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"),
    [(1, 1, 2), (9, 3, 64), (4, 2, 18), (5, 1, 80), (14, 2, 32), (2, 1, 256)],
)
def test_prompts_and_what_follows(
    kv_type: KvType, products: str, is_wild: bool, num_heads: int, num_kv_heads: int, dim: int
) -> None:
    """Chunks of a window and more, of a tile and less, and single tokens."""
    rng = np.random.default_rng(dim)
    width = (num_heads + 2 * num_kv_heads) * dim
    rows = numbers_of_any_size(rng, 330, width) if is_wild else normal(330, width, seed=dim)
    spec = AttentionSpec(num_heads, num_kv_heads, dim, dim**-0.5)
    rope = Rope((0.0,) * (dim // 2), False)
    blocks = [int(block) for block in rng.permutation(40)]

    def results(isa: str, ends: list[int]) -> list[bytes]:
        program = compile_rows(
            backend_of(products, isa),
            lambda ops, x, w: ops.attention(x, 0, spec, rope),
            rows,
            kv=KvLayout(1, num_kv_heads, dim, 40, dtype=kv_type),
        )
        found = []
        for begin, end in pairwise([0, *ends]):
            found.append(run(program, batch_of((range(begin, end), begin, blocks))))
        assert np.isfinite(np.concatenate(found)).all()
        return [row.tobytes() for row in np.concatenate(found)]

    whole = results(ISAS[0], [330])
    for isa in ISAS:
        assert results(isa, [330]) == whole, isa
        assert results(isa, [90, 91, 95, 160, 325, 326, 330]) == whole, isa
