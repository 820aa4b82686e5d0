"""ModelExecutor: runs step plans on a model that one of our own backends has compiled.

It keeps no sequence state: a plan carries all that a step needs besides the KV blocks.
"""

import logging
import queue
import threading
import time
from array import array
from typing import Any

from headrace.adapters.executors.port import OnStepDone
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
        self._program: Program = backend.compile(model.forward, layout, step_tokens)
        self.spec = WorkerSpec(
            model_digest=model.digest,
            kv_dtype=layout.dtype,
            block_size=layout.block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            batch_invariant=backend.batch_invariant,
        )
        self._inbox: queue.SimpleQueue[tuple[StepPlan, OnStepDone] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-executor", daemon=True)
        self._thread.start()

    def start(self, plan: StepPlan, on_done: OnStepDone) -> None:
        self._inbox.put((plan, on_done))

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            plan, on_done = work
            try:
                done: StepDone | StepFailed = StepDone(self._step(plan))
            except Exception as error:
                # Whatever it was, the step has no result and the next one may still have.
                _log.exception("step %d failed", plan.step_id)
                lines = str(error).splitlines() or [type(error).__name__]
                done = StepFailed(plan.step_id, lines[0])
            on_done(done)

    def _step(self, plan: StepPlan) -> StepResult:
        started = time.monotonic_ns()
        if plan.copies:
            self._program.copy_blocks(plan.copies)
        batch, requests, num_rows = lay_out(plan)
        self._program.run(batch)
        rows = self._program.finish_rows(requests) if requests else []
        results, first = [], 0
        for seq, count in zip(plan.seqs, num_rows, strict=True):
            results.append(_seq_result(seq, rows[first : first + count]))
            first += count
        elapsed = Ns(time.monotonic_ns() - started)
        return StepResult(plan.step_id, tuple(results), elapsed)


def lay_out(plan: StepPlan) -> tuple[StepBatch, list[RowRequest], list[int]]:
    """The ragged batch of a plan, what is wanted of its logits rows, and how many rows each
    sequence has.
    """
    tokens, starts, positions = array("i"), array("i", [0]), array("i")
    logit_rows = array("i")
    requests: list[RowRequest] = []
    num_rows: list[int] = []
    for seq in plan.seqs:
        base = len(tokens)
        tokens.extend(seq.tokens)
        starts.append(len(tokens))
        positions.append(seq.start)
        num_before = len(requests)
        if seq.prompt_logprobs is not None:
            for index, target in enumerate(_targets(seq)):
                logit_rows.append(base + index)
                requests.append(RowRequest(None, target, seq.prompt_logprobs))
        if seq.sample is not None:
            logit_rows.append(len(tokens) - 1)
            requests.append(RowRequest(seq.sample, None, seq.sample.params.logprobs))
        num_rows.append(len(requests) - num_before)
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
    sampled = rows[-1:]
    return SeqResult(
        seq.seq_id,
        tuple(row.token for row in sampled),
        _logprobs(sampled),
        _logprobs(rows[:-1]),
    )


def _logprobs(rows: list[RowResult]) -> tuple[TokenLogprob, ...]:
    return tuple(row.logprob for row in rows if row.logprob is not None)
