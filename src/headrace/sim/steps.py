"""Results of steps that nobody computes: tokens out of one long list, times by a cost model."""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Final

from headrace.adapters.executors.sim import StepOutcome, lost_step
from headrace.core.base.events import StepDone
from headrace.core.base.plan import SeqResult, SeqStep, StepPlan, StepResult
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.cost.calibration import Residuals
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.model import CostModel, StepShape

Written = Callable[[SeqId, int, int], tuple[int, ...]]
"""The tokens of a sequence at the positions from the second argument to the third."""

_NUM_TOKENS: Final = 1 << 16  # of the list; a sequence begins somewhere in it
_STRIDE: Final = 40_503  # odd, so that neighbours begin far from each other


@cache
def _listed(vocab_size: int, seed: int) -> tuple[int, ...]:
    """Twice the list, so that a slice may begin anywhere. All workers of a cluster share it."""
    return tuple(Random(seed).choices(range(vocab_size), k=_NUM_TOKENS)) * 2


class ListedSteps:
    """A StepSource whose tokens depend on the sequence and the position alone, so that they are the
    same wherever and with whomever it runs. A token costs a look-up, of which there are millions.
    `written` says what sequences answer where that is known beforehand.
    """

    def __init__(
        self,
        cost: CostModel,
        vocab_size: int,
        *,
        seed: int = 0,
        written: Written | None = None,
        uneven: "Uneven | None" = None,
    ) -> None:
        """Those that are `uneven` may not be taken many at once: each takes its own time."""
        self._cost = cost
        self._uneven = uneven
        self._tokens = _listed(vocab_size, seed)
        self._written = written

    def outcome(self, plan: StepPlan) -> StepOutcome:
        shape = StepShape.of(plan)
        elapsed_ns = self.elapsed_ns(shape)
        if self._uneven is not None:
            elapsed_ns = Ns(max(1, round(elapsed_ns * self._uneven.factor(plan.step_id, shape))))
        seqs = tuple(self._result(seq) for seq in plan.seqs)
        return StepDone(StepResult(plan.step_id, seqs, elapsed_ns)), elapsed_ns

    def lost(self, plan: StepPlan) -> StepOutcome:
        return lost_step(plan)

    def tokens(self, seq_id: SeqId, start: int, end: int) -> tuple[int, ...]:
        """At these positions of a sequence, no more than the list has."""
        if self._written is not None:
            return self._written(seq_id, start, end)
        first = (seq_id * _STRIDE + start) % _NUM_TOKENS
        return self._tokens[first : first + end - start]

    def elapsed_ns(self, shape: StepShape) -> Ns:
        return self._cost.step_ns(shape)

    def decode_ns(self, first: StepShape, num_steps: int) -> list[Ns]:
        """Of so many steps from this one on, in which the same sequences decode."""
        if isinstance(self._cost, DataSheetCostModel):
            return self._cost.decode_ns(first, num_steps)
        n, num_kv = first.num_seqs, first.num_kv_tokens
        return [
            self._cost.step_ns(StepShape(n, n, n, kv, kv))
            for kv in range(num_kv, num_kv + num_steps * n, n)
        ]

    def _result(self, seq: SeqStep) -> SeqResult:
        if seq.sample is None:
            return SeqResult(seq.seq_id)
        position = seq.sample.position
        return SeqResult(seq.seq_id, self.tokens(seq.seq_id, position, position + 1))


class Uneven:
    """How much longer or shorter than predicted a worker's steps take: runs of residuals that were
    measured one after another, drawn with replacement (Künsch's block bootstrap), so that steps are
    held up in a row as they were. A pure function of the seed and the step.
    """

    def __init__(self, residuals: Residuals, seed: str) -> None:
        self._residuals = residuals
        self._seed = seed
        self._run = -1
        self._draw = 0.0

    def factor(self, step_id: StepId, shape: StepShape) -> float:
        ratios, size = self._residuals.of(shape), self._residuals.run_steps
        if not ratios:
            return 1.0
        run, place = divmod(step_id, size)
        if run != self._run:
            self._run, self._draw = run, Random(f"{self._seed}/{run}").random()
        begin = int(self._draw * (len(ratios) // size)) * size
        return ratios[(begin + place) % len(ratios)]
