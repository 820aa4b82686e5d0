"""Fit a cost model to the machine at hand, by running steps whose results nobody needs."""

import queue

from headrace.adapters.executors.port import Executor
from headrace.core.base.errors import DeviceError
from headrace.core.base.events import StepDone, StepFailed
from headrace.core.base.plan import SampleSpec, SeqStep, StepPlan
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, Ns, SeqId, StepId
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import StepShape

# (sequences, tokens of each, tokens before them): decode at several widths, prefill, long contexts.
SHAPES = (
    *((1, 1, 0), (2, 1, 32), (4, 1, 32), (8, 1, 32), (16, 1, 32), (32, 1, 32)),
    *((1, 16, 0), (1, 64, 0), (1, 128, 0), (1, 1, 512), (8, 1, 512), (1, 64, 512)),
)
# Short steps vary most, and repeating them costs least.
NUM_REPEATS, MAX_REPEATED_TOKENS = 3, 32


def calibrate(executor: Executor, *, step_tokens: int) -> FittedCostModel:
    """The executor's cost model, from those of SHAPES that fit it. Takes about a second on a
    laptop.

    Call it before an engine uses the executor. It writes to blocks from 0 on, which no sequence
    holds yet. Raises DeviceError where a step fails.
    """
    plans = [plan for shape in SHAPES if (plan := _plan(executor, step_tokens, *shape)) is not None]
    # The first step pays for pages and caches that no later one pays for.
    _run(executor, plans[0])
    samples = (
        (StepShape.of(plan), _run(executor, plan))
        for plan in plans
        for _ in range(NUM_REPEATS if plan.num_tokens <= MAX_REPEATED_TOKENS else 1)
    )
    return FittedCostModel.fit(samples, name="calibrated at start")


def _plan(
    executor: Executor, step_tokens: int, num_seqs: int, num_tokens: int, start: int
) -> StepPlan | None:
    """A step of equal sequences, or None where this executor has no room for it."""
    spec = executor.spec
    num_blocks = -(-(start + num_tokens) // spec.block_size)
    if (
        num_seqs * num_blocks > spec.num_blocks
        or start + num_tokens > spec.max_model_len
        or num_seqs * num_tokens > step_tokens
    ):
        return None
    seqs = tuple(
        SeqStep(
            SeqId(index),
            start,
            (0,) * num_tokens,
            tuple(BlockId(index * num_blocks + i) for i in range(num_blocks)),
            SampleSpec(SamplingParams(temperature=0.0), start + num_tokens),
        )
        for index in range(num_seqs)
    )
    return StepPlan(StepId(0), seqs)


def _run(executor: Executor, plan: StepPlan) -> Ns:
    ends: queue.SimpleQueue[StepDone | StepFailed] = queue.SimpleQueue()
    executor.start(plan, ends.put)
    end = ends.get()
    if isinstance(end, StepFailed):
        raise DeviceError(f"a calibration step failed: {end.error}")
    return end.result.elapsed_ns
