"""Single operations of a model, each as a program of its own.

Decides which shapes stand for the model's; refuses to time them.
"""

from array import array
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec

from headrace.bench.cells import BLOCK_TOKENS, Cell
from headrace.bench.census import (
    Attention,
    Census,
    KnownWeight,
    attention_product,
    product_of,
)
from headrace.bench.limits import Work
from headrace.core.base.plan import BlockCopy, SampleSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId
from headrace.ops.interface import KvLayout, Program, RowRequest, StepBatch, TensorView, WeightType
from headrace.ops.native.backend import NativeBackend

LINEAR_ROWS = (1, 32, 256)
ATTENTIONS = (
    Cell(name="attention, decode 32 at 1070", num_seqs=32, start=1069),
    Cell(name="attention, chunk of 512 at 1536", num_tokens=512, start=1536),
)
NUM_NORM_ROWS, NUM_NORMS = 256, 64
NUM_SAMPLED_ROWS = 32
_NOTHING = Work(weight_bytes=0, kv_bytes=0, operations={})
_NO_KV = KvLayout(1, 1, 2, num_blocks=512)


class Prepared(msgspec.Struct, frozen=True):
    """`run` does the operation `count` times; `work` is that of one."""

    run: Callable[[], object]
    count: int
    work: Work


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    prepare: Callable[[NativeBackend], Prepared]
    cell: Cell = Cell(name="")  # what it needs of context and KV
    is_rounded: bool = False  # the others do the same whatever activations are rounded to


def operations_of(
    census: Census, layout: Callable[[int], KvLayout], vocab_size: int
) -> Iterator[Operation]:
    """The operations of the model that `census` has counted. `layout` is its KV pool of so many
    blocks.
    """
    for weights in largest_of_each_type(census):
        for num_rows in LINEAR_ROWS:
            yield _linear(weights, num_rows)
    attentions = census.attentions
    for cell in ATTENTIONS:
        yield _attention(attentions, layout(cell.num_blocks), cell)
    yield _norm(census.linears[0].weight.cols)
    yield _sampling("sampling, greedy", SamplingParams(temperature=0.0), vocab_size)
    nucleus = SamplingParams(temperature=0.7, top_p=0.9)
    yield _sampling("sampling, top_p 0.9", nucleus, vocab_size)


def largest_of_each_type(census: Census) -> list[list[KnownWeight]]:
    """Of each type, all weights of the shape that has the most bytes: as many as the model has, so
    that they come from memory as in a step.
    """
    groups: dict[tuple[WeightType, int, int], dict[int, KnownWeight]] = {}
    for linear in census.linears:
        weight = linear.weight
        key = (weight.type, weight.rows, weight.cols)
        groups.setdefault(key, {})[id(weight.handle)] = weight
    largest: dict[WeightType, list[KnownWeight]] = {}
    for (type_, _, _), group in groups.items():
        weights = list(group.values())
        if sum(w.num_bytes for w in weights) > sum(w.num_bytes for w in largest.get(type_, [])):
            largest[type_] = weights
    return list(largest.values())


def table_of(
    backend: NativeBackend, cols: int, rows: int = BLOCK_TOKENS, deviation: float = 1.0
) -> Any:
    """A weight of normal noise, which `embed` takes rows from."""
    rng = Random(1)
    noise = array("f", [rng.gauss(0.0, deviation) for _ in range(1021)])
    values = (noise * (rows * cols // len(noise) + 1))[: rows * cols]
    data = memoryview(values.tobytes())
    return backend.load_weight(TensorView("noise", WeightType.F32, rows, cols, data))


def fill(program: Program, num_blocks: int) -> None:
    """Write every block of a pool: pages that nobody wrote to would all be one page, in the
    cache.
    """
    batch = StepBatch(
        tokens=[0] * BLOCK_TOKENS,
        token_starts=[0, BLOCK_TOKENS],
        positions=[0],
        block_tables=[[BlockId(0)]],
        logit_rows=[],
    )
    program.run(batch)
    copies = [BlockCopy(BlockId(0), BlockId(i), BLOCK_TOKENS) for i in range(1, num_blocks)]
    program.copy_blocks(copies)


def running(program: Program, cell: Cell) -> Callable[[], None]:
    batch = cell.batch()
    return lambda: program.run(batch)


def _linear(weights: list[KnownWeight], num_rows: int) -> Operation:
    one = weights[0]

    def prepare(backend: NativeBackend) -> Prepared:
        table = table_of(backend, one.cols)

        def forward(ops: Any) -> Any:
            x = ops.select_logit_rows(ops.embed(table))
            return [ops.linear(x, (weight.handle,)) for weight in weights][-1]

        cell = Cell(name="rows", num_seqs=num_rows)
        work = Work(
            weight_bytes=one.num_bytes,
            kv_bytes=0,
            operations={product_of(one.type, backend): 2 * num_rows * one.rows * one.cols},
        )
        program = backend.compile(forward, _NO_KV, num_rows)
        return Prepared(running(program, cell), len(weights), work)

    name = f"linear {one.type} {one.rows} x {one.cols}, {num_rows} row" + "s" * (num_rows > 1)
    return Operation(name=name, prepare=prepare, is_rounded=True)


def _attention(attentions: list[Attention], layout: KvLayout, cell: Cell) -> Operation:
    spec = attentions[0].spec

    def prepare(backend: NativeBackend) -> Prepared:
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        table = table_of(backend, width)

        def forward(ops: Any) -> Any:
            qkv = ops.embed(table)
            seen = [
                ops.attention(qkv, layer, attention.spec, attention.rope)
                for layer, attention in enumerate(attentions)
            ]
            return ops.select_logit_rows(seen[-1])

        tokens = max(BLOCK_TOKENS, cell.num_step_tokens)
        program = backend.compile(forward, layout, tokens)
        fill(program, cell.num_blocks)
        work = Work(
            weight_bytes=0,
            kv_bytes=4 * cell.num_kv_tokens * spec.num_kv_heads * spec.head_dim,
            operations={
                attention_product(backend): 4 * cell.num_pairs * spec.num_heads * spec.head_dim
            },
        )
        return Prepared(running(program, cell), len(attentions), work)

    return Operation(name=cell.name, prepare=prepare, cell=cell, is_rounded=True)


def _norm(width: int) -> Operation:
    def prepare(backend: NativeBackend) -> Prepared:
        table, weight = table_of(backend, width), table_of(backend, width, rows=1)

        def forward(ops: Any) -> Any:
            x = ops.select_logit_rows(ops.embed(table))
            return [ops.rms_norm(x, weight, 1e-5) for _ in range(NUM_NORMS)][-1]

        cell = Cell(name="rows", num_seqs=NUM_NORM_ROWS)
        program = backend.compile(forward, _NO_KV, NUM_NORM_ROWS)
        return Prepared(running(program, cell), NUM_NORMS, _NOTHING)

    return Operation(name=f"norm of {width}, {NUM_NORM_ROWS} rows", prepare=prepare)


def _sampling(name: str, params: SamplingParams, vocab_size: int) -> Operation:
    def prepare(backend: NativeBackend) -> Prepared:
        # About as undecided as a model: some tens of tokens have most of the likelihood.
        table = table_of(backend, vocab_size, deviation=4.0)

        def forward(ops: Any) -> Any:
            return ops.select_logit_rows(ops.embed(table))

        program = backend.compile(forward, _NO_KV, NUM_SAMPLED_ROWS)
        program.run(Cell(name="rows", num_seqs=NUM_SAMPLED_ROWS).batch())
        requests = [RowRequest(SampleSpec(params, position=i)) for i in range(NUM_SAMPLED_ROWS)]
        return Prepared(lambda: program.finish_rows(requests), 1, _NOTHING)

    return Operation(name=f"{name}, {NUM_SAMPLED_ROWS} rows of {vocab_size}", prepare=prepare)
