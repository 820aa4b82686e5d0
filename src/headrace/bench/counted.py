"""Work of a fixed size, to count the instructions of: `python -m headrace.bench.counted CASE N`.

Decides the cases; refuses to know who counts. The process prepares every case and runs one of them
N times, on one thread, so that the difference between two N is the case alone.
"""

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.bench.cells import Cell
from headrace.bench.operations import fill, running, table_of
from headrace.core.base.plan import SampleSpec
from headrace.core.base.sampling import SamplingParams
from headrace.models.gguf import TENSOR_TYPES
from headrace.ops.interface import (
    AttentionSpec,
    KvLayout,
    Rope,
    RowRequest,
    TensorView,
    WeightType,
)
from headrace.ops.native.backend import NativeBackend, usable_isas

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 4, 2, 64, 4096
_BLOCKS = {name: (values, num_bytes) for name, values, num_bytes in TENSOR_TYPES.values()}
_LINEARS = (("q4_1", "int8"), ("q8_0", "int8"), ("q4_1", "f32"), ("q8_0", "f32"), ("bf16", "f32"))
_KV = KvLayout(1, KV_HEADS, HEAD_DIM, num_blocks=64)


def countable_isa() -> str:
    """The fastest instruction set here that a counting emulator knows."""
    return "avx2" if "avx2" in usable_isas() else "portable"


class Case(msgspec.Struct, frozen=True):
    run: Callable[[], object]
    num_runs: (
        int  # for some tens of millions of instructions: the rest of a process varies a little
    )


def cases() -> dict[str, Case]:
    """Each case, ready to run, under a name that says what it is."""
    backends = {name: NativeBackend(1, countable_isa(), name) for name in ("f32", "int8")}
    made: dict[str, Case] = {}
    for type_, activations in _LINEARS:
        for num_rows, num_runs in ((1, 500), (32, 40)):
            name = f"linear {type_} {activations}, {num_rows} row" + "s" * (num_rows > 1)
            run = _linear(backends[activations], WeightType(type_), num_rows)
            made[name] = Case(run, num_runs)
    backend = backends["f32"]
    decode = Cell(name="attention, decode 3 at 320", num_seqs=3, start=319)
    chunk = Cell(name="attention, chunk of 64 at 256", num_tokens=64, start=256)
    for cell, num_runs in ((decode, 60), (chunk, 6)):
        made[cell.name] = Case(_attention(backend, cell), num_runs)
    made["norm, 32 rows"] = Case(_norm(backend), 150)
    greedy, nucleus = (SamplingParams(temperature=t, top_p=0.9) for t in (0.0, 0.7))
    made["sampling, greedy"] = Case(_sampling(backend, greedy), 1000)
    made["sampling, top_p"] = Case(_sampling(backend, nucleus), 100)
    return made


def _linear(backend: NativeBackend, type_: WeightType, num_rows: int) -> Callable[[], object]:
    values, num_bytes = _BLOCKS[type_.value]
    # Any bytes that are an ordinary number in every type.
    data = memoryview(b"\x2c" * (WIDTH * WIDTH // values * num_bytes))
    weight = backend.load_weight(TensorView("weight", type_, WIDTH, WIDTH, data))
    table = table_of(backend, WIDTH)

    def forward(ops: Any) -> Any:
        return ops.linear(ops.select_logit_rows(ops.embed(table)), (weight,))

    program = backend.compile(forward, _KV, num_rows)
    return running(program, Cell(name="", num_seqs=num_rows))


def _attention(backend: NativeBackend, cell: Cell) -> Callable[[], object]:
    spec = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
    rope = Rope(tuple(1e4 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)), False)
    table = table_of(backend, (HEADS + 2 * KV_HEADS) * HEAD_DIM)

    def forward(ops: Any) -> Any:
        return ops.select_logit_rows(ops.attention(ops.embed(table), 0, spec, rope))

    program = backend.compile(forward, _KV, max(16, cell.num_step_tokens))
    fill(program, _KV.num_blocks)
    return running(program, cell)


def _norm(backend: NativeBackend) -> Callable[[], object]:
    table, weight = table_of(backend, WIDTH), table_of(backend, WIDTH, rows=1)

    def forward(ops: Any) -> Any:
        return ops.rms_norm(ops.select_logit_rows(ops.embed(table)), weight, 1e-5)

    return running(backend.compile(forward, _KV, 32), Cell(name="", num_seqs=32))


def _sampling(backend: NativeBackend, params: SamplingParams) -> Callable[[], object]:
    table = table_of(backend, VOCAB, deviation=4.0)

    def forward(ops: Any) -> Any:
        return ops.select_logit_rows(ops.embed(table))

    program = backend.compile(forward, _KV, 1)
    running(program, Cell(name=""))()
    requests = [RowRequest(SampleSpec(params, position=1))]
    return lambda: program.finish_rows(requests)


def main(arguments: list[str]) -> int:
    name, num_runs = arguments
    run = cases()[name].run
    for _ in range(int(num_runs)):
        run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
