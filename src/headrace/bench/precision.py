"""What rounding costs: the perplexity of a model under each type of activations and of KV.

Decides how texts are scored and compared; refuses to know what rounds where.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.base.types import BlockId
from headrace.core.config.schema import DeviceConfig
from headrace.live.boot import BLOCK_SIZE, make_backend
from headrace.models.load import load_model
from headrace.ops.interface import KvLayout, KvType, Program, RowRequest, StepBatch

TEXTS = ("tests/golden/data/alice.txt", "LICENSE")
"""Prose and a licence, of a checkout: texts that do not change."""

ACTIVATIONS = ("f32", "int12", "int8")
_CHUNK_TOKENS = 256


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """One arithmetic beside the first of those measured with it."""

    activations: str
    kv_dtype: str
    num_tokens: int  # scored: all but the first of each text
    perplexity: float
    change: float  # of the perplexity, relative to the first arithmetic's
    change_error: float  # standard error of `change` over tokens


def read_texts(paths: Sequence[str]) -> list[str]:
    """ConfigError where one cannot be read."""
    try:
        return [Path(path).expanduser().read_text(encoding="utf-8") for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read a text: {error}", hint="name a --text, or run in a checkout of headrace"
        ) from error


def measure_precision(model: Path, texts: Sequence[str]) -> Iterator[Precision]:
    """Every type of activations with every type of KV, exact activations over bf16 KV first."""
    exact: list[float] | None = None
    for activations in ACTIVATIONS:
        backend = make_backend(DeviceConfig(activations=activations))
        loaded = load_model(model, backend)
        tokens = [loaded.tokenizer.encode(text, add_special=False) for text in texts]
        num_blocks = -(-max(map(len, tokens)) // BLOCK_SIZE)
        for kv_type in KvType:
            shape = loaded.model
            layout = KvLayout(
                shape.num_layers, shape.num_kv_heads, shape.head_dim, num_blocks, dtype=kv_type
            )
            program = backend.compile(shape.forward, layout, _CHUNK_TOKENS)
            found = list(chain.from_iterable(log_likelihoods(program, text) for text in tokens))
            exact = exact or found
            yield _compared(activations, kv_type, found, exact)
        loaded.close()


def log_likelihoods(program: Program, tokens: Sequence[int]) -> Iterator[float]:
    """Log probability of every token but the first, given those before it."""
    num_known = len(tokens) - 1
    for start in range(0, num_known, _CHUNK_TOKENS):
        end = min(start + _CHUNK_TOKENS, num_known)
        table = [BlockId(i) for i in range(-(-end // BLOCK_SIZE))]
        size = end - start
        program.run(StepBatch(tokens[start:end], (0, size), (start,), (table,), range(size)))
        targets = tokens[start + 1 : end + 1]
        for row in program.finish_rows([RowRequest(None, target, num_top=0) for target in targets]):
            assert row.logprob is not None
            yield row.logprob.logprob


def _compared(
    activations: str, kv_type: KvType, found: Sequence[float], exact: Sequence[float]
) -> Precision:
    count = len(found)
    lost = [before - after for after, before in zip(found, exact, strict=True)]
    mean = sum(lost) / count
    spread = math.sqrt(sum((one - mean) ** 2 for one in lost)) / count
    return Precision(
        activations=activations,
        kv_dtype=kv_type.value,
        num_tokens=count,
        perplexity=math.exp(-sum(found) / count),
        change=math.expm1(mean),
        change_error=math.exp(mean) * spread,
    )
