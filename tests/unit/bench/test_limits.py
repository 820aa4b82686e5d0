"""Limits are measured, and shares of them are arithmetic."""

from pathlib import Path

import pytest

from headrace.bench.limits import Share, Work, last_cache_bytes, share_of
from headrace.ops.native import _native
from support.limits import LIMITS


def work(num_bytes: int, **operations: int) -> Work:
    return Work(weight_bytes=num_bytes // 2, kv_bytes=num_bytes // 2, operations=operations)


def test_the_longer_of_reading_and_computing_binds() -> None:
    reading = work(20_000_000, f32=100_000_000)  # 1 ms, 0.5 ms
    assert share_of(reading, 0.002, LIMITS) == Share(0.5, "memory")
    computing = work(20_000_000, f32=400_000_000)  # 1 ms, 2 ms
    assert share_of(computing, 0.002, LIMITS) == Share(1.0, "arithmetic")


def test_products_of_different_kinds_take_their_times_one_after_another() -> None:
    mixed = work(0, f32=200_000_000, int4=800_000_000, int8=400_000_000, bf16=0)  # 1 ms each
    assert share_of(mixed, 0.006, LIMITS) == Share(0.5, "arithmetic")


def test_nothing_to_do_has_no_share() -> None:
    assert share_of(work(0), 0.01, LIMITS) == Share(None, "")


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_limits_are_measured_on_every_instruction_set(isa: str) -> None:
    pool = _native.Pool(2)
    assert _native.read_limit(pool, isa, 1 << 20, 0.001) > 1e8
    for kind in ("f32", "int4", "int8"):
        assert _native.product_limit(pool, isa, kind, 0.001) > 1e8
    has_bf16 = _native.bf16_products(isa) != "fma"
    assert (_native.product_limit(pool, isa, "bf16", 0.001) > 0) == has_bf16


def test_what_cannot_be_measured_is_a_fault() -> None:
    pool = _native.Pool(1)
    with pytest.raises(_native.Fault, match="f32, int4, int8 or bf16, got f64"):
        _native.product_limit(pool, "portable", "f64", 0.001)
    with pytest.raises(_native.Fault, match="too little memory"):
        _native.read_limit(pool, "portable", 100, 0.001)
    with pytest.raises(_native.Fault, match="not usable here"):
        _native.read_limit(pool, "sse9", 1 << 20, 0.001)


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    for index, size in enumerate(["32K", "512K", "32M", "what"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_cache_bytes(tmp_path) == 32 << 20
    assert last_cache_bytes(tmp_path / "index0") == 0
