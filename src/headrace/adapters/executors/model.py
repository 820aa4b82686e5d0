"""ModelExecutor: runs step plans on a model that one of our own backends has compiled.

It keeps no sequence state: a plan carries all that a step needs besides the KV blocks.
"""

import logging
import queue
import threading
import time
from typing import Any

from headrace.adapters.executors.port import OnStepDone
from headrace.core.base.errors import DeviceError
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import (
    SeqResult,
    SeqStep,
    StepPlan,
    StepResult,
    TokenLogprob,
    WorkerSpec,
)
from headrace.core.base.types import Ns
from headrace.ops.interface import (
    Backend,
    KvLayout,
    Model,
    Program,
    RowRequest,
    RowResult,
    StepBatch,
)

_log = logging.getLogger(__name__)

_Inbox = queue.SimpleQueue[tuple[StepPlan, OnStepDone] | None]


class ModelExecutor:
    """The Executor port over any Backend. Steps run on a thread of its own, one at a time."""

    def __init__(
        self,
        backend: Backend[Any, Any],
        model: Model[Any, Any],
        *,
        num_blocks: int,
        step_tokens: int,
        max_model_len: int,
    ) -> None:
        """Compile `model` with a KV pool of `num_blocks`, for steps of `step_tokens` at most."""
        layout = KvLayout(model.num_layers, model.num_kv_heads, model.head_dim, num_blocks)
        program = backend.compile(model.forward, layout, step_tokens)
        self.spec = WorkerSpec(
            model_digest=model.digest,
            kv_dtype=layout.dtype,
            block_size=layout.block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            batch_invariant=backend.batch_invariant,
        )
        self._inbox: _Inbox = queue.SimpleQueue()
        self._is_closed = False
        # The thread alone holds the program, so that the device is free when it ends.
        self._thread = threading.Thread(
            target=_serve, args=(program, self._inbox), name="headrace-executor", daemon=True
        )
        self._thread.start()

    def start(self, plan: StepPlan, on_done: OnStepDone) -> None:
        if self._is_closed:
            raise DeviceError("the executor is closed", step_id=plan.step_id)
        self._inbox.put((plan, on_done))

    def close(self) -> None:
        self._is_closed = True
        self._inbox.put(None)
        self._thread.join()


def _serve(program: Program, inbox: _Inbox) -> None:
    while (work := inbox.get()) is not None:
        plan, on_done = work
        try:
            done: StepDone | StepFailed = StepDone(run_step(program, plan))
        except Exception as error:
            # Whatever it was, the step has no result and the next one may still have.
            _log.exception("step %d failed", plan.step_id)
            lines = str(error).splitlines() or [type(error).__name__]
            done = StepFailed(plan.step_id, lines[0])
        on_done(done)


def run_step(program: Program, plan: StepPlan) -> StepResult:
    started_ns = time.monotonic_ns()
    if plan.copies:
        program.copy_blocks(plan.copies)
    batch, requests, num_rows = lay_out(plan)
    program.run(batch)
    rows = program.finish_rows(requests) if requests else []
    end = 0
    results = tuple(
        _seq_result(seq, rows[end : (end := end + count)])
        for seq, count in zip(plan.seqs, num_rows, strict=True)
    )
    elapsed_ns = Ns(time.monotonic_ns() - started_ns)
    return StepResult(plan.step_id, results, elapsed_ns)


def lay_out(plan: StepPlan) -> tuple[StepBatch, list[RowRequest], list[int]]:
    """The ragged batch of a plan, what is wanted of its logits rows, and how many rows each
    sequence has.
    """
    tokens: list[int] = []
    starts = [0]
    logit_rows: list[int] = []
    requests: list[RowRequest] = []
    num_rows: list[int] = []
    for seq in plan.seqs:
        first = len(tokens)
        num_before = len(requests)
        tokens += seq.tokens
        starts.append(len(tokens))
        if seq.prompt_logprobs is not None:
            for row, target in enumerate(_targets(seq), first):
                logit_rows.append(row)
                requests.append(RowRequest(None, target, seq.prompt_logprobs))
        if seq.sample is not None:
            logit_rows.append(len(tokens) - 1)
            requests.append(RowRequest(seq.sample, None, seq.sample.params.logprobs))
        num_rows.append(len(requests) - num_before)
    positions = [seq.start for seq in plan.seqs]
    tables = [seq.block_ids for seq in plan.seqs]
    return StepBatch(tokens, starts, positions, tables, logit_rows), requests, num_rows


def _targets(seq: SeqStep) -> tuple[int, ...]:
    """The prompt tokens that follow the share's positions."""
    if seq.next_prompt_token is not None:
        return (*seq.tokens[1:], seq.next_prompt_token)
    return seq.tokens[1:]


def _seq_result(seq: SeqStep, rows: list[RowResult]) -> SeqResult:
    if seq.sample is None:
        return SeqResult(seq.seq_id, prompt_logprobs=_logprobs(rows))
    chosen = rows.pop()
    logprobs = () if chosen.logprob is None else (chosen.logprob,)
    return SeqResult(seq.seq_id, (chosen.token,), logprobs, _logprobs(rows))


def _logprobs(rows: list[RowResult]) -> tuple[TokenLogprob, ...]:
    return tuple([row.logprob for row in rows if row.logprob is not None])
