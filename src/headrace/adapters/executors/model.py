"""ModelExecutor: runs step plans on a model that one of our own backends has compiled.

It keeps no sequence state: a plan carries all that a step needs besides the KV blocks.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

import msgspec

from headrace.adapters.executors.port import OnStepDone
from headrace.core.base.errors import DeviceError
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import (
    PENDING,
    SeqResult,
    SeqStep,
    StepPlan,
    StepResult,
    TokenLogprob,
    WorkerSpec,
    settled,
)
from headrace.core.base.types import Ns, SeqId
from headrace.ops.interface import (
    Backend,
    KvFile,
    KvLayout,
    KvType,
    Model,
    Program,
    RowRequest,
    RowResult,
    StepBatch,
)

_log = logging.getLogger(__name__)

_IDLE_S = 0.002  # longer than what lies between two steps
_ANY_TOKEN = 0  # where a step was planned upon one that never came: nobody reads what it computes

_Inbox: TypeAlias = "queue.SimpleQueue[tuple[StepPlan, Layout, OnStepDone] | None]"


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
        kv_type: KvType = KvType.BF16,
        kv_file: KvFile | None = None,
    ) -> None:
        """Compile `model` with a KV pool of `num_blocks`, for steps of `step_tokens` at most."""
        layout = KvLayout(
            model.num_layers, model.num_kv_heads, model.head_dim, num_blocks, dtype=kv_type
        )
        program = backend.compile(model.forward, layout, step_tokens, kv_file)
        self.spec = WorkerSpec(
            model_digest=digest_of(model, backend),
            kv_dtype=layout.dtype.value,
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
        # Here and not on the executor's thread, which may be busy with the step before.
        self._inbox.put((plan, lay_out(plan), on_done))

    def close(self) -> None:
        self._is_closed = True
        self._inbox.put(None)
        self._thread.join()


def digest_of(model: Model[Any, Any], backend: Backend[Any, Any]) -> str:
    """Hex SHA-256 over what decides an output: equal ones have equal bits, of KV too."""
    return sha256(f"{model.digest} {backend.arithmetic}".encode()).hexdigest()


class Layout(NamedTuple):
    """A plan as a ragged batch, what is wanted of its logits rows, and how many rows each sequence
    has.
    """

    batch: StepBatch
    requests: list[RowRequest]
    num_rows: list[int]


def _serve(program: Program, inbox: _Inbox) -> None:
    sampled: dict[SeqId, int] | None = None  # by the last step; None = it failed
    while (work := _next_work(program, inbox)) is not None:
        plan, layout, on_done = work
        try:
            if plan.is_ahead:
                if sampled is None:
                    raise DeviceError("the step before has failed")
                layout = settle(plan, layout, sampled)
            result = run_step(program, plan, layout)
            sampled = {
                seq.seq_id: seq.tokens[0] if seq.tokens else _ANY_TOKEN
                for seq in result.seqs
                if seq.tokens or seq.error
            }
            done: StepDone | StepFailed = StepDone(result)
        except Exception as error:
            # Whatever it was, the step has no result and the next one may still have.
            if not (plan.is_ahead and sampled is None):
                _log.exception("step %d failed", plan.step_id)
            sampled = None
            lines = str(error).splitlines() or [type(error).__name__]
            done = StepFailed(plan.step_id, lines[0])
        on_done(done)


def _next_work(program: Program, inbox: _Inbox) -> tuple[StepPlan, Layout, OnStepDone] | None:
    """While there is none, memory is readied for what may come."""
    while True:
        try:
            return inbox.get(timeout=_IDLE_S)
        except queue.Empty:
            if not program.ready_blocks():
                return inbox.get()


def run_step(program: Program, plan: StepPlan, layout: Layout) -> StepResult:
    """Carry out a plan without PENDING tokens."""
    started_ns = time.monotonic_ns()
    if plan.copies:
        program.copy_blocks(plan.copies)
    program.run(layout.batch)
    rows = program.finish_rows(layout.requests) if layout.requests else []
    end = 0
    results = tuple(
        _seq_result(seq, rows[end : (end := end + count)])
        for seq, count in zip(plan.seqs, layout.num_rows, strict=True)
    )
    elapsed_ns = Ns(time.monotonic_ns() - started_ns)
    return StepResult(plan.step_id, results, elapsed_ns)


def lay_out(plan: StepPlan) -> Layout:
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
    return Layout(StepBatch(tokens, starts, positions, tables, logit_rows), requests, num_rows)


def settle(plan: StepPlan, layout: Layout, sampled: Mapping[SeqId, int]) -> Layout:
    """The layout with the tokens that the step before has sampled in the place of PENDING."""
    if any(seq.sample and seq.sample.output_tokens[-1:] == (PENDING,) for seq in plan.seqs):
        return lay_out(settled(plan, sampled))
    tokens = list(layout.batch.tokens)
    for seq, end in zip(plan.seqs, layout.batch.token_starts[1:], strict=True):
        if tokens[end - 1] == PENDING:
            tokens[end - 1] = sampled[seq.seq_id]
    return layout._replace(batch=msgspec.structs.replace(layout.batch, tokens=tokens))


def _targets(seq: SeqStep) -> tuple[int, ...]:
    """The prompt tokens that follow the share's positions."""
    if seq.next_prompt_token is not None:
        return (*seq.tokens[1:], seq.next_prompt_token)
    return seq.tokens[1:]


def _seq_result(seq: SeqStep, rows: list[RowResult]) -> SeqResult:
    for row in rows:
        if row.fault:
            return SeqResult(seq.seq_id, error=f"no token can come of the logits: {row.fault}")
    if seq.sample is None:
        return SeqResult(seq.seq_id, prompt_logprobs=_logprobs(rows))
    chosen = rows.pop()
    logprobs = () if chosen.logprob is None else (chosen.logprob,)
    return SeqResult(seq.seq_id, (chosen.token,), logprobs, _logprobs(rows))


def _logprobs(rows: list[RowResult]) -> tuple[TokenLogprob, ...]:
    return tuple([row.logprob for row in rows if row.logprob is not None])
