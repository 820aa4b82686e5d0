"""What a worker's cost model says to the router's questions.

Decides what a prefill beside decoding sequences is taken to cost; refuses to know which worker is
meant.
"""

from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import StepShape


class Predictor:
    """Durations in nanoseconds, for steps of at most `step_tokens`."""

    __slots__ = ("cost", "step_tokens")

    def __init__(self, cost: FittedCostModel | None, step_tokens: int) -> None:
        self.cost = cost or FittedCostModel.prior()
        self.step_tokens = step_tokens

    def num_steps(self, num_tokens: int) -> int:
        return -(-num_tokens // self.step_tokens)

    def prefill_ns(self, num_tokens: int, num_cached: int) -> int:
        """Of that many tokens behind `num_cached` others, alone on the worker, in equal steps."""
        steps = self.num_steps(num_tokens)
        pairs = num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2
        kv = num_cached + (num_tokens + num_tokens // steps) // 2
        shape = StepShape(num_tokens // steps, 1, 1, pairs // steps, kv)
        return steps * self.cost.step_ns(shape)

    def backlog_ns(self, num_tokens: int) -> int:
        """Of prefill of which nothing but its size is known."""
        return self.prefill_ns(num_tokens, 0) if num_tokens > 0 else 0

    def output_extra_ns(self, num_seqs: int, num_kv_tokens: int) -> int:
        """By which each output token comes later, beside that many others that decode."""
        together = StepShape(num_seqs + 1, num_seqs + 1, num_seqs + 1, num_kv_tokens, num_kv_tokens)
        return self.cost.step_ns(together) - self.cost.step_ns(StepShape(1, 1, 1, 0, 0))

    def step_extra_ns(self, num_seqs: int, num_kv_tokens: int) -> int:
        """By which each full step of prefill takes longer, beside that many others that decode."""
        n = self.step_tokens
        mixed = StepShape(n + num_seqs, num_seqs, num_seqs, num_kv_tokens, num_kv_tokens)
        return self.cost.step_ns(mixed) - self.cost.step_ns(StepShape(n, 0, 0, 0, 0))

    def copy_ns(self, num_bytes: int, link: str) -> int | None:
        """None where the link is not known."""
        return self.cost.copy_ns(num_bytes, link) if link in self.cost.links else None
