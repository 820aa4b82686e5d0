"""The same model from the same file computes the same on every backend, up to stated rounding."""

import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from headrace.adapters.executors.model import ModelExecutor
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import (
    BlockCopy,
    SampleSpec,
    SeqResult,
    SeqStep,
    StepPlan,
    TokenLogprob,
)
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, SeqId, StepId
from headrace.models.load import load_model
from headrace.ops.interface import KvType
from headrace.ops.torch.backend import TorchBackend
from support.model_files import F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0
from support.tiny_model import BF16, VOCAB, write_tiny_folder, write_tiny_model

native = pytest.importorskip("headrace.ops.native._native")

FILES = {
    "mixed": None, "f32": F32, "f16": F16, "bf16": BF16, "q4_0": Q4_0, "q4_1": Q4_1,
    "q5_0": Q5_0, "q5_1": Q5_1, "q8_0": Q8_0, "q4_k": Q4_K, "q5_k": Q5_K, "q6_k": Q6_K,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Steps this small are slower where a second thread has to be woken."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=[*FILES, "folder"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "folder":
        return write_tiny_folder(folder / "model", seed=2)
    return write_tiny_model(folder / "tiny.gguf", seed=2, matrices=FILES[request.param])


class Runner:
    """Steps on one backend, one after another."""

    def __init__(self, backend: Any, path: Path, kv_type: KvType) -> None:
        model = load_model(path, backend).model
        self._executor = ModelExecutor(
            backend, model, num_blocks=16, step_tokens=128, max_model_len=256, kv_type=kv_type
        )
        self.close = self._executor.close

    def run(self, *seqs: SeqStep, copies: tuple[BlockCopy, ...] = ()) -> tuple[SeqResult, ...]:
        endings: queue.SimpleQueue[StepDone | StepFailed] = queue.SimpleQueue()
        self._executor.start(StepPlan(StepId(0), seqs, copies), endings.put)
        ending = endings.get(timeout=60)
        assert isinstance(ending, StepDone)
        return ending.result.seqs


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def share(
    tokens: Sequence[int], blocks: Sequence[int], start: int, end: int, *, is_prompt: bool = True
) -> SeqStep:
    """Positions start to end of a sequence; every row scored over the whole vocabulary."""
    params = SamplingParams(temperature=0.0, logprobs=VOCAB)
    return SeqStep(
        SeqId(0),
        start,
        tuple(tokens[start:end]),
        tuple(BlockId(block) for block in blocks[: -(-end // 16)]),
        SampleSpec(params, end) if end == len(tokens) else None,
        VOCAB if is_prompt else None,
        tokens[end] if end < len(tokens) else None,
    )


def script(runner: Runner, continuation: Sequence[int]) -> Iterator[TokenLogprob]:
    """Two prompts in chunks, a third that shares a block and a half of the first, then decoding
    along `continuation`.
    """
    first, second = prompt(50, 1), prompt(21, 2)
    third = first[:23] + prompt(12, 3)
    tables = [[7, 2, 13, 0, 5], [4, 9], [7, 11, 1]]
    for results in (
        runner.run(share(first, tables[0], 0, 30), share(second, tables[1], 0, 21)),
        runner.run(
            share(first, tables[0], 30, 50),
            share(third, tables[2], 23, 35),
            copies=(BlockCopy(BlockId(2), BlockId(11), 7),),
        ),
    ):
        for result in results:
            yield from result.prompt_logprobs + result.logprobs
    for i in range(len(continuation)):
        tokens = [*first, *continuation[: i + 1]]
        last = len(tokens)
        (result,) = runner.run(share(tokens, tables[0], last - 1, last, is_prompt=False))
        yield from result.logprobs


@pytest.fixture(scope="module")
def expected(model_path: Path) -> list[TokenLogprob]:
    return rows_of(TorchBackend(), model_path)


def rows_of(backend: Any, path: Path, kv_type: KvType = KvType.BF16) -> list[TokenLogprob]:
    runner = Runner(backend, path, kv_type)
    try:
        return list(script(runner, prompt(20, 4)))
    finally:
        runner.close()


@pytest.mark.parametrize("isa", native.usable_isas())
def test_log_probabilities_agree(model_path: Path, expected: list[TokenLogprob], isa: str) -> None:
    from headrace.ops.native.backend import NativeBackend

    assert_agree(
        rows_of(NativeBackend(threads=1, isa=isa, activations="f32"), model_path), expected
    )


@pytest.mark.parametrize("kv_type", [KvType.INT8, KvType.FP8])
def test_log_probabilities_agree_over_every_kv_type(kv_type: KvType, tmp_path: Path) -> None:
    from headrace.ops.native.backend import NativeBackend

    path = write_tiny_model(tmp_path / "tiny.gguf", seed=2)
    rows = rows_of(NativeBackend(threads=1, activations="f32"), path, kv_type)
    assert_agree(rows, rows_of(TorchBackend(), path, kv_type))


def assert_agree(rows: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]) -> None:
    assert len(rows) == len(expected) == 50 + 21 + 12 + 20
    ours, theirs = (
        np.array([[value for _, value in sorted(row.top)] for row in each])
        for each in (rows, expected)
    )
    assert ours.shape == theirs.shape == (len(rows), VOCAB)
    # Both compute in float32. What is left is a key or value that one rounds up and the other down,
    # 2^-8 of one element among hundreds in bf16, more in 8 bits, but more seldom. In units of the
    # spread of the log probabilities, seen are 1e-4 in the mean and 6e-3 at most.
    differences = np.abs(ours - theirs) / theirs.std()
    assert differences.mean() < 5e-4
    assert differences.max() < 2e-2
    # So the likeliest token is the same wherever the second is further behind than that.
    clear = [other.top[0][1] - other.top[1][1] > 4e-2 * theirs.std() for other in expected]
    assert sum(clear) > len(clear) / 2
    for row, other, is_clear in zip(rows, expected, clear, strict=True):
        assert row.top[0][0] == other.top[0][0] or not is_clear
