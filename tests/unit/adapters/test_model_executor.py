"""ModelExecutor: from a plan to a batch and back, on a program that only records."""

import queue
import threading
import weakref
from itertools import count
from typing import Any, cast

import pytest

from headrace.adapters.executors.model import ModelExecutor, digest_of, lay_out
from headrace.core.base.errors import DeviceError
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import (
    PENDING,
    BlockCopy,
    SampleSpec,
    SeqResult,
    SeqStep,
    StepPlan,
)
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, SeqId, StepId
from headrace.ops.interface import KvFile, KvLayout, KvType
from support.recording_backend import RecordingBackend, RecordingProgram


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


@pytest.mark.parametrize("where", ["copy", "run", "finish"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (DeviceError("no room", hint="less", row=3), "no room (row=3)"),
        (ValueError(), "ValueError"),
        (KeyError(1), "1"),
    ],
)
def test_a_fault_fails_its_step_and_no_other(where: str, fault: Exception, message: str) -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    backend.program.faults[where] = fault
    plan = StepPlan(StepId(4), PLAN.seqs, (BlockCopy(BlockId(0), BlockId(1), 3),))
    assert run(executor, plan) == StepFailed(StepId(4), message)
    assert isinstance(run(executor, plan), StepDone)
    executor.close()


@pytest.mark.parametrize(("row", "spoilt"), [(0, 0), (2, 2), (3, 3), (5, 3)])
def test_a_row_without_a_token_is_an_error_of_its_sequence_alone(row: int, spoilt: int) -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    sound = run(executor, PLAN)
    backend.program.spoilt_rows = {row}
    done = run(executor, PLAN)
    executor.close()
    assert isinstance(sound, StepDone)
    assert isinstance(done, StepDone)
    for index, (seq, before) in enumerate(zip(done.result.seqs, sound.result.seqs, strict=True)):
        if index == spoilt:
            error = "no token can come of the logits: not a number"
            assert seq == SeqResult(before.seq_id, error=error)
        else:
            assert seq == before


AHEAD = StepPlan(
    StepId(5),
    (
        seq_step(0, 21, (PENDING,), sample=sample(22)),
        seq_step(4, 0, (9, 9)),
        seq_step(3, 3, (PENDING,), sample=sample(4)),
    ),
    is_ahead=True,
)


def test_a_plan_ahead_is_carried_out_with_the_tokens_of_the_step_before() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    done: queue.SimpleQueue[StepDone | StepFailed] = queue.SimpleQueue()
    backend.program.may_run.clear()
    executor.start(PLAN, done.put)
    executor.start(AHEAD, done.put)
    backend.program.may_run.set()
    first, second = done.get(timeout=10), done.get(timeout=10)
    executor.close()
    assert isinstance(first, StepDone)
    assert isinstance(second, StepDone)
    assert (first.result.step_id, second.result.step_id) == (4, 5)
    assert backend.program.tokens[1] == [121, 9, 9, 103]
    assert [seq.tokens for seq in second.result.seqs] == [(122,), (), (104,)]


def test_penalties_count_the_token_of_the_step_before() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    run(executor, PLAN)
    spec = SampleSpec(SamplingParams(presence_penalty=1.0), 22, (), (1, 2), (8, PENDING))
    share = seq_step(0, 21, (PENDING,), sample=spec)
    assert isinstance(run(executor, StepPlan(StepId(5), (share,), is_ahead=True)), StepDone)
    executor.close()
    assert backend.program.tokens[1] == [121]
    (request,) = backend.program.requests[1]
    assert request.sample is not None
    assert request.sample.output_tokens == (8, 121)


def test_a_plan_ahead_of_a_step_that_failed_fails_too() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    backend.program.faults["finish"] = DeviceError("no power")
    assert isinstance(run(executor, PLAN), StepFailed)
    assert run(executor, AHEAD) == StepFailed(StepId(5), "the step before has failed")
    assert run(executor, AHEAD) == StepFailed(StepId(5), "the step before has failed")
    assert isinstance(run(executor, PLAN), StepDone)
    assert isinstance(run(executor, AHEAD), StepDone)
    executor.close()


def test_a_plan_ahead_of_a_sequence_without_a_token_serves_the_others() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    backend.program.spoilt_rows = {0}
    run(executor, PLAN)
    backend.program.spoilt_rows = set()
    done = run(executor, AHEAD)
    executor.close()
    assert isinstance(done, StepDone)
    assert backend.program.tokens[1][1:] == [9, 9, 103]
    assert done.result.seqs[2].tokens == (104,)


def test_start_does_not_wait_and_results_come_from_another_thread() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    threads: list[threading.Thread] = []
    done = threading.Event()

    def on_done(result: StepDone | StepFailed) -> None:
        threads.append(threading.current_thread())
        done.set()

    backend.program.may_run.clear()
    executor.start(PLAN, on_done)
    assert not threads
    backend.program.may_run.set()
    assert done.wait(10)
    executor.close()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()


def test_the_time_of_a_step_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_of(RecordingBackend())
    ticks = count(1_000, 77)
    monkeypatch.setattr("headrace.adapters.executors.model.time.monotonic_ns", lambda: next(ticks))
    done = run(executor, PLAN)
    monkeypatch.undo()
    executor.close()
    assert isinstance(done, StepDone)
    assert done.result.elapsed_ns == 77


def test_memory_is_readied_while_there_is_nothing_to_do() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    assert backend.program.is_ready.wait(10)
    assert isinstance(run(executor, PLAN), StepDone)
    executor.close()
    assert 1 <= backend.program.num_readied <= 3


def test_close_finishes_the_step_and_frees_the_device() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    done: queue.SimpleQueue[StepDone | StepFailed] = queue.SimpleQueue()
    backend.program.may_run.clear()
    executor.start(PLAN, done.put)
    threading.Timer(0.01, backend.program.may_run.set).start()
    executor.close()
    assert isinstance(done.get_nowait(), StepDone)
    executor.close()
    with pytest.raises(DeviceError, match="closed"):
        executor.start(PLAN, done.put)
    assert done.empty()
    program = weakref.ref(backend.program)
    del backend
    assert program() is None


def test_a_model_that_does_not_fit_leaves_no_thread() -> None:
    class FullBackend(RecordingBackend):
        def compile(
            self,
            forward: object,
            kv: KvLayout,
            max_tokens: int,
            kv_file: KvFile | None = None,
        ) -> RecordingProgram:
            raise DeviceError("the KV pool does not fit")

    threads = {*threading.enumerate()}
    with pytest.raises(DeviceError, match="fit"):
        executor_of(FullBackend())
    assert {*threading.enumerate()} <= threads


def test_what_the_core_is_told() -> None:
    backend = RecordingBackend()
    executor = executor_of(backend)
    executor.close()
    spec = executor.spec
    assert backend.compiled == (KvLayout(2, 3, 8, 9), 32)
    assert (spec.num_blocks, spec.block_size) == (9, 16)
    assert (spec.max_model_len, spec.vocab_size, spec.batch_invariant) == (50, 500, True)


def test_the_kv_type_is_part_of_what_names_a_block() -> None:
    backend = RecordingBackend()
    executor = ModelExecutor(
        backend, Shape(), num_blocks=9, step_tokens=32, max_model_len=50, kv_type=KvType.INT8
    )
    executor.close()
    assert backend.compiled == (KvLayout(2, 3, 8, 9, dtype=KvType.INT8), 32)
    assert executor.spec.kv_dtype == "int8"


def test_the_digest_changes_with_the_model_and_with_the_arithmetic() -> None:
    class OtherModel(Shape):
        digest = "cd"

    class OtherBackend(RecordingBackend):
        arithmetic = "another"

    model, backend = cast("Any", Shape()), cast("Any", RecordingBackend())
    digests = {
        digest_of(model, backend),
        digest_of(cast("Any", OtherModel()), backend),
        digest_of(model, cast("Any", OtherBackend())),
    }
    assert len(digests) == 3
    assert digest_of(model, backend) in digests
