"""What one step costs the host: the time EngineCore takes between two forward passes.

Decides the steady state that is measured; refuses to know a device: results come at once.
"""

import time

import msgspec

from headrace.bench.loads import Spread
from headrace.core.base.events import Arrive, StartStep, StepDone
from headrace.core.base.plan import SeqResult, StepPlan, StepResult, WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.schema import SchedulerConfig, WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.engine.build import build_worker
from headrace.core.engine.core import EngineCore

NUM_PROMPT_TOKENS = 64
BLOCK_SIZE = 16


class StepOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """Time inside `handle(StepDone)`: results applied, tokens emitted, the next step planned."""

    num_running_seqs: int
    num_steps: int
    step_us: Spread


def fill(num_seqs: int, num_output_tokens: int) -> tuple[EngineCore, StepPlan]:
    """An engine to which `num_seqs` sequences have just come, and its first step."""
    spec = WorkerSpec(
        model_digest="00",
        kv_dtype="bf16",
        block_size=BLOCK_SIZE,
        num_blocks=num_seqs * (2 + (NUM_PROMPT_TOKENS + num_output_tokens) // BLOCK_SIZE),
        max_model_len=NUM_PROMPT_TOKENS + num_output_tokens,
        vocab_size=1 << 16,
    )
    config = WorkerConfig(scheduler=SchedulerConfig(max_running_seqs=num_seqs, overlap="off"))
    core = build_worker(config, spec, FittedCostModel.prior())
    params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
    seqs = tuple(
        SeqSpec(
            seq_id=SeqId(i),
            request_id=str(i),
            prompt_tokens=tuple(range(i, i + NUM_PROMPT_TOKENS)),
            params=params,
        )
        for i in range(num_seqs)
    )
    effects = core.handle(Ns(0), Arrive(seqs))
    return core, next(effect.plan for effect in effects if isinstance(effect, StartStep))


def result_of(plan: StepPlan) -> StepResult:
    seqs = tuple(
        SeqResult(seq.seq_id, (seq.sample.position,) if seq.sample else ()) for seq in plan.seqs
    )
    return StepResult(plan.step_id, seqs, Ns(1))


def measure(num_seqs: int, num_steps: int) -> StepOverhead:
    """Steps in which each of `num_seqs` running sequences decodes one token."""
    # Twice the steps leave room for the prefill steps that come first.
    core, plan = fill(
        num_seqs, num_output_tokens=2 * num_steps + NUM_PROMPT_TOKENS * num_seqs // 64
    )
    now, taken_us = 0, list[float]()
    while len(taken_us) < num_steps:
        event = StepDone(result_of(plan))
        is_steady = len(plan.seqs) == plan.num_tokens == num_seqs
        now += 1_000_000
        started = time.perf_counter_ns()
        effects = core.handle(Ns(now), event)
        elapsed = time.perf_counter_ns() - started
        plan = next(effect.plan for effect in effects if isinstance(effect, StartStep))
        if is_steady:
            taken_us.append(elapsed / 1e3)
    core.check()
    return StepOverhead(num_running_seqs=num_seqs, num_steps=num_steps, step_us=Spread.of(taken_us))


def measure_all(num_steps: int = 512) -> list[StepOverhead]:
    """At 1, 32 and 256 running sequences."""
    return [measure(num_seqs, num_steps) for num_seqs in (1, 32, 256)]
