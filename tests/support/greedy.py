"""The plainest way to drive a program: one batch from the first token to the last."""

from collections.abc import Sequence
from typing import Any

from headrace.core.base.plan import SampleSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId
from headrace.ops.interface import (
    Backend,
    KvLayout,
    Model,
    Program,
    RowRequest,
    RowResult,
    StepBatch,
)

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


def compile_model(
    backend: Backend[Any, Any], model: Model[Any, Any], *, num_blocks: int, max_tokens: int
) -> Program:
    kv = KvLayout(model.num_layers, model.num_kv_heads, model.head_dim, num_blocks, BLOCK_SIZE)
    return backend.compile(model.forward, kv, max_tokens)


def greedy(
    program: Program, prompts: Sequence[Sequence[int]], num_tokens: int, *, num_top: int = 0
) -> list[list[RowResult]]:
    """`num_tokens` greedy tokens after each prompt, all prompts in one batch.

    The program needs blocks for every prompt and its tokens, and steps as large as all prompts
    together.
    """
    num_blocks = [-(-(len(prompt) + num_tokens) // BLOCK_SIZE) for prompt in prompts]
    starts = [sum(num_blocks[:i]) for i in range(len(prompts))]
    tables = [
        [BlockId(start + i) for i in range(count)]
        for start, count in zip(starts, num_blocks, strict=True)
    ]
    lengths = [0] * len(prompts)
    chunks = [list(prompt) for prompt in prompts]
    answers: list[list[RowResult]] = [[] for _ in prompts]
    for _ in range(num_tokens):
        _run(program, chunks, lengths, tables)
        lengths = [done + len(chunk) for done, chunk in zip(lengths, chunks, strict=True)]
        results = program.finish_rows(
            [RowRequest(SampleSpec(GREEDY, length), num_top=num_top) for length in lengths]
        )
        for answer, result in zip(answers, results, strict=True):
            answer.append(result)
        chunks = [[result.token] for result in results]
    return answers


def forced(
    program: Program, prompt: Sequence[int], tokens: Sequence[int], *, num_top: int
) -> list[RowResult]:
    """What `greedy` finds after `prompt` as long as it takes `tokens`, in a single step."""
    known = [*prompt, *tokens[:-1]]
    table = [BlockId(i) for i in range(-(-len(known) // BLOCK_SIZE))]
    _run(program, [known], [0], [table], rows=range(len(prompt) - 1, len(known)))
    return program.finish_rows([RowRequest(None, target=t, num_top=num_top) for t in tokens])


def log_likelihoods(program: Program, tokens: Sequence[int], chunk_tokens: int) -> list[float]:
    """Log probability of every token but the first, given those before it."""
    table = [BlockId(i) for i in range(-(-len(tokens) // BLOCK_SIZE))]
    found: list[float] = []
    for start in range(0, len(tokens) - 1, chunk_tokens):
        chunk = list(tokens[start : min(start + chunk_tokens, len(tokens) - 1)])
        _run(program, [chunk], [start], [table], rows=range(len(chunk)))
        targets = tokens[start + 1 : start + 1 + len(chunk)]
        results = program.finish_rows([RowRequest(None, target=t, num_top=0) for t in targets])
        found += [result.logprob.logprob for result in results if result.logprob is not None]
    return found


def _run(
    program: Program,
    chunks: Sequence[Sequence[int]],
    positions: Sequence[int],
    tables: Sequence[Sequence[BlockId]],
    *,
    rows: Sequence[int] | None = None,
) -> None:
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + len(chunk))
    last_rows = [end - 1 for end in starts[1:]]
    program.run(
        StepBatch(
            tokens=[token for chunk in chunks for token in chunk],
            token_starts=starts,
            positions=positions,
            block_tables=tables,
            logit_rows=last_rows if rows is None else list(rows),
        )
    )
