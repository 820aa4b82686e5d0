"""ModelExecutor: from a plan to a batch and back, on a program that only records."""

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.adapters.executors.model import ModelExecutor, lay_out
from headrace.core.base.errors import DeviceError
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import BlockCopy, SampleSpec, SeqStep, StepPlan, TokenLogprob
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, SeqId, StepId
from headrace.ops.interface import KvLayout, RowRequest, RowResult, StepBatch


class RecordingProgram:
    """Answers each row with its request's target, or 100 + the position to sample."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.batch: StepBatch | None = None
        self.fault: Exception | None = None

    def run(self, batch: StepBatch) -> None:
        self.calls.append("run")
        self.batch = batch
        if self.fault is not None:
            raise self.fault

    def finish_rows(self, requests: Sequence[RowRequest]) -> list[RowResult]:
        self.calls.append("finish")
        return [RowResult(_token(request), _score(request)) for request in requests]

    def logits(self) -> list[list[float]]:
        return []

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.calls.append("copy")


def _token(request: RowRequest) -> int:
    if request.sample is not None:
        return 100 + request.sample.position
    assert request.target is not None
    return request.target


def _score(request: RowRequest) -> TokenLogprob | None:
    return None if request.num_top is None else TokenLogprob(_token(request), -1.0, 0)


class RecordingBackend:
    name = "recording"
    batch_invariant = True

    def __init__(self) -> None:
        self.program = RecordingProgram()
        self.compiled: tuple[KvLayout, int] | None = None

    def load_weight(self, view: object) -> object:
        return view

    def weight_bytes(self) -> int:
        return 0

    def compile(self, forward: object, kv: KvLayout, max_tokens: int) -> RecordingProgram:
        self.compiled = kv, max_tokens
        return self.program


class Shape:
    vocab_size, max_model_len, num_layers, num_kv_heads, head_dim, digest = 500, 64, 2, 3, 8, "ab"

    def forward(self, ops: Any) -> Any:
        return ops


def executor_of(backend: RecordingBackend) -> ModelExecutor:
    return ModelExecutor(backend, Shape(), num_blocks=9, step_tokens=32, max_model_len=50)


def seq_step(seq_id: int, start: int, tokens: tuple[int, ...], **fields: Any) -> SeqStep:
    blocks = (BlockId(seq_id), BlockId(seq_id + 1))
    return SeqStep(SeqId(seq_id), start, tokens, blocks, **fields)


def sample(position: int, **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), position)


PLAN = StepPlan(
    StepId(4),
    (
        seq_step(0, 20, (7,), sample=sample(21)),
        seq_step(1, 0, (1, 2, 3)),
        seq_step(2, 2, (3, 4), prompt_logprobs=1, next_prompt_token=5),
        seq_step(3, 0, (6, 7, 8), prompt_logprobs=0, sample=sample(3, logprobs=2)),
    ),
)


def run(executor: ModelExecutor, plan: StepPlan) -> StepDone | StepFailed:
    done: queue.SimpleQueue[StepDone | StepFailed] = queue.SimpleQueue()
    executor.start(plan, done.put)
    result = done.get(timeout=10)
    assert done.empty()
    return result


def test_a_plan_becomes_a_ragged_batch() -> None:
    batch, requests, num_rows = lay_out(PLAN)
    assert list(batch.tokens) == [7, 1, 2, 3, 3, 4, 6, 7, 8]
    assert list(batch.token_starts) == [0, 1, 4, 6, 9]
    assert list(batch.positions) == [20, 0, 2, 0]
    assert batch.block_tables == [(0, 1), (1, 2), (2, 3), (3, 4)]
    # Rows: the sample of 0; both positions of 2; two scored positions of 3, then its sample.
    assert list(batch.logit_rows) == [0, 4, 5, 6, 7, 8]
    assert num_rows == [1, 0, 2, 3]
    assert [request.target for request in requests] == [None, 4, 5, 7, 8, None]
    assert [request.num_top for request in requests] == [None, 1, 1, 0, 0, 2]


def test_results_come_back_in_plan_order() -> None:
    executor = executor_of(RecordingBackend())
    done = run(executor, PLAN)
    executor.close()
    assert isinstance(done, StepDone)
    first, second, third, fourth = done.result.seqs
    assert (first.tokens, first.logprobs) == ((121,), ())
    assert (second.tokens, second.prompt_logprobs) == ((), ())
    assert [score.token_id for score in third.prompt_logprobs] == [4, 5]
    assert fourth.tokens == (103,)
    assert [score.token_id for score in fourth.logprobs] == [103]
    assert [score.token_id for score in fourth.prompt_logprobs] == [7, 8]
    assert done.result.elapsed_ns > 0


def test_copies_go_before_the_pass() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    run(executor, StepPlan(StepId(0), PLAN.seqs, (BlockCopy(BlockId(0), BlockId(1), 3),)))
    executor.close()
    assert backend.program.calls == ["copy", "run", "finish"]


def test_a_step_without_wanted_rows_asks_for_none() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    run(executor, StepPlan(StepId(0), PLAN.seqs[1:2]))
    executor.close()
    assert backend.program.calls == ["run"]


@pytest.mark.parametrize("fault", [DeviceError("no room\nhint: less"), ValueError(), KeyError(1)])
def test_a_fault_fails_its_step_and_no_other(fault: Exception) -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    backend.program.fault = fault
    failed = run(executor, PLAN)
    assert isinstance(failed, StepFailed)
    assert failed.step_id == 4
    assert failed.error
    assert "\n" not in failed.error
    backend.program.fault = None
    assert isinstance(run(executor, PLAN), StepDone)
    executor.close()


def test_results_come_from_another_thread_and_close_ends_it() -> None:
    executor = executor_of(RecordingBackend())
    threads: list[threading.Thread] = []
    done = threading.Event()

    def on_done(result: StepDone | StepFailed) -> None:
        threads.append(threading.current_thread())
        done.set()

    executor.start(PLAN, on_done)
    assert done.wait(10)
    executor.close()
    executor.close()
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


def test_what_the_core_is_told() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    executor.close()
    spec = executor.spec
    assert backend.compiled == (KvLayout(2, 3, 8, 9), 32)
    assert (spec.model_digest, spec.num_blocks, spec.block_size) == ("ab", 9, 16)
    assert (spec.max_model_len, spec.vocab_size, spec.batch_invariant) == (50, 500, True)
