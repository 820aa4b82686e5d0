"""The cost model of a running engine, learned from its own steps.

A pure function of the steps it was told about: a replayed log and a simulation learn what the
recorded engine learned, step by step.
"""

from typing import Final

from headrace.core.base.plan import StepPlan
from headrace.core.base.types import Ns, StepId
from headrace.core.cost.fitted import FittedCostModel, OnlineFit
from headrace.core.cost.model import CostModel, StepShape

# Steps below which a fit is a guess. The first prompts and a few rounds of decoding reach it.
MIN_SAMPLES: Final = 16
# A sample counts half after that many more, so the fit follows a machine that slows down.
HALF_LIFE: Final = 1024
# A fit costs half a millisecond, and this many samples change it little. Nor does this share of
# those that count by then.
SAMPLES_PER_FIT: Final = 32
SHARE_PER_FIT: Final = 1 / 8
# Larger steps than so many times the largest that was seen are not told of.
FAR: Final = 8
# Steps that only decode resemble each other, and they are the short ones, where time on the host
# counts: once predictions are reliable, one in this many is a sample.
DECODE_STEPS_PER_SAMPLE: Final = 8


class LearnedCost:
    """A CostModel: the one that it begins with, until its own steps tell more.

    Memory does not grow with the number of steps. Learning costs a few µs for a sampled step; the
    fit is made only when somebody asks for a prediction and enough steps have passed.
    """

    def __init__(self, first: CostModel) -> None:
        fitted = first if isinstance(first, FittedCostModel) else None
        self._fit = OnlineFit(prior=fitted, half_life=HALF_LIFE)
        self._model = first
        self._num_given = MIN_SAMPLES if fitted is None else fitted.num_samples
        self._next_fit_at = MIN_SAMPLES
        self._most_tokens = 0  # of a step that the model is fitted to

    @property
    def is_reliable(self) -> bool:
        """Whether predictions rest on measurements, or on a model that somebody vouched for."""
        return self._num_given + self._fit.num_samples >= MIN_SAMPLES

    def learn(self, plan: StepPlan, elapsed_ns: Ns) -> None:
        """A step took this long on the device."""
        if self._is_sample(plan.step_id, len(plan.seqs), plan.num_tokens):
            self._fit.add(StepShape.of(plan), elapsed_ns)

    def learn_shape(self, step_id: StepId, shape: StepShape, elapsed_ns: Ns) -> None:
        """As `learn`, without the step's plan."""
        if self._is_sample(step_id, shape.num_seqs, shape.num_tokens):
            self._fit.add(shape, elapsed_ns)

    def _is_sample(self, step_id: StepId, num_seqs: int, num_tokens: int) -> bool:
        is_like_others = self.is_reliable and num_seqs == num_tokens
        return not is_like_others or step_id % DECODE_STEPS_PER_SAMPLE == 0

    @staticmethod
    def learned_among(first: StepId, num_steps: int) -> range:
        """Which of so many steps that only decode, counted from 0, are samples, once predictions
        are reliable.
        """
        return range(-first % DECODE_STEPS_PER_SAMPLE, num_steps, DECODE_STEPS_PER_SAMPLE)

    def step_ns(self, shape: StepShape) -> Ns:
        return self.current.step_ns(shape)

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        return self._model.copy_ns(num_bytes, link)

    def told_ns(self, num_tokens: int) -> Ns | None:
        """Of a step of so many prompt tokens, by the last fit, since whoever only looks makes no
        new one; None before the first, and where none of its steps was nearly as large: those that
        only decode show nothing of prompts.
        """
        if FAR * self._most_tokens < num_tokens:
            return None
        return self._model.step_ns(StepShape(num_tokens, 0, 0, 0, 0))

    @property
    def current(self) -> CostModel:
        """What is known by now; for whoever asks several questions at once."""
        if self._fit.num_samples >= self._next_fit_at:
            self._model = self._fit.fit("learned from its own steps")
            self._most_tokens = self._fit.largest.num_tokens
            num_counting = min(self._fit.num_samples, HALF_LIFE)
            num_new = max(SAMPLES_PER_FIT, round(num_counting * SHARE_PER_FIT))
            self._next_fit_at = self._fit.num_samples + num_new
        return self._model
