"""Same bytes for one thread and two, and on every instruction set, whatever the schedule: for every
type of weights, activations, attention, keys and values.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from headrace.core.config.schema import DeviceConfig
from headrace.ops.interface import KvType
from support.model_files import Q4_0, Q4_1, Q8_0
from support.schedules import (
    MAX_MODEL_LEN,
    MAX_PROMPT,
    MAX_TOKENS,
    SMALL_POOL_BLOCKS,
    Output,
    block_bytes,
    draw_requests,
    run,
    run_alone,
    start,
)
from support.tiny_model import BF16, VOCAB, write_tiny_model

native = pytest.importorskip("headrace.ops.native._native")


class Arithmetic(NamedTuple):
    name: str
    weights: int  # GGUF type of the tiny model's matrices
    activations: str
    attention: str


KINDS = (
    Arithmetic("bf16", BF16, "f32", "f32"),
    Arithmetic("q4_1", Q4_1, "f32", "f32"),
    Arithmetic("q8_0", Q8_0, "f32", "bf16"),
    Arithmetic("q4_1-int8", Q4_1, "int8", "bf16"),
)
MORE_KINDS = (
    Arithmetic("q4_0", Q4_0, "f32", "f32"),
    Arithmetic("q4_0-int8", Q4_0, "int8", "f32"),
    Arithmetic("q8_0-int8", Q8_0, "int8", "bf16"),
    Arithmetic("bf16-bf16", BF16, "bf16", "bf16"),
)
KV_DTYPES = [kv_type.value for kv_type in KvType]


def hold_together(
    folder: Path, arithmetic: Arithmetic, kv_dtype: str, isas: list[str], *, num_requests: int
) -> None:
    """Requests alone on one thread, and all at once, in pieces and preempted: on one thread and two
    of each instruction set, but each by itself where its arithmetic is its own.
    """
    path = write_tiny_model(folder / "tiny.gguf", seed=3, matrices=arithmetic.weights)
    requests = draw_requests(
        VOCAB, num_requests=num_requests, max_prompt=MAX_PROMPT, max_tokens=MAX_TOKENS
    )

    def device(isa: str, threads: int) -> DeviceConfig:
        return DeviceConfig(
            isa=isa,
            threads=threads,
            activations=arithmetic.activations,
            attention=arithmetic.attention,
        )

    alone: dict[bool, list[Output]] = {}
    for isa in isas:
        has_own = arithmetic.activations == "bf16" and native.bf16_products(isa) == "dot"
        if has_own not in alone:
            alone[has_own] = run_alone(path, requests, kv_dtype, device(isa, 1))
        for threads in (1, 2):
            booted = start(
                path,
                chunk_tokens=16,
                num_blocks=SMALL_POOL_BLOCKS,
                block_bytes=block_bytes(kv_dtype),
                max_model_len=MAX_MODEL_LEN,
                kv_dtype=kv_dtype,
                device=device(isa, threads),
            )
            try:
                outputs = run(booted, requests, salt="", num_concurrent=num_requests)
                assert outputs == alone[has_own], (isa, threads)
                assert booted.engine.stats().num_preemptions > 0
            finally:
                booted.close()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("arithmetic", KINDS, ids=lambda one: one.name)
def test_threads_and_instruction_sets_change_no_byte(
    arithmetic: Arithmetic, kv_dtype: str, tmp_path: Path
) -> None:
    """On the two fastest instruction sets of this CPU."""
    hold_together(tmp_path, arithmetic, kv_dtype, native.usable_isas()[-2:][::-1], num_requests=8)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("arithmetic", KINDS + MORE_KINDS, ids=lambda one: one.name)
def test_all_instruction_sets_change_no_byte(
    arithmetic: Arithmetic, kv_dtype: str, tmp_path: Path
) -> None:
    hold_together(tmp_path, arithmetic, kv_dtype, native.usable_isas(), num_requests=32)
