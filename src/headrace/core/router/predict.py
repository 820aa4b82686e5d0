"""What a worker's cost model says to the router's questions.

Decides what a prefill beside decoding sequences is taken to cost; refuses to know which worker is
meant.
"""

from typing import NamedTuple

from headrace.core.base.types import WorkerId
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.router.events import WorkerUp


class Predictor:
    """Durations in nanoseconds. Workers that are alike share one, so that a question is asked once
    for all of them.
    """

    __slots__ = (
        "_formula",
        "_full_step_ns",
        "_output_ns",
        "block_bytes",
        "block_size",
        "cost",
        "step_tokens",
    )

    def __init__(
        self, cost: FittedCostModel | None, *, step_tokens: int, block_size: int, block_bytes: int
    ) -> None:
        self.cost = cost or FittedCostModel.prior()
        self.step_tokens = step_tokens  # most tokens of a step
        self.block_size = block_size
        self.block_bytes = block_bytes  # on the wire; 0 = its blocks cannot be moved
        self._formula = self.cost.formula
        self._output_ns = self._formula.ns(1, 1, 1, 0, 0)  # of a token, alone
        self._full_step_ns = self._formula.ns(step_tokens, 0, 0, 0, 0)

    @classmethod
    def of(cls, up: WorkerUp) -> "Predictor":
        return cls(
            up.cost,
            step_tokens=max(1, up.step_tokens),
            block_size=up.spec.block_size,
            block_bytes=up.kv_block_bytes,
        )

    def slower(self, factor: float) -> "Predictor":
        """Of workers whose steps take so many times as long."""
        return Predictor(
            self.cost.slower(factor),
            step_tokens=self.step_tokens,
            block_size=self.block_size,
            block_bytes=self.block_bytes,
        )

    @property
    def full_step_ns(self) -> int:
        """Of a step of prompts alone."""
        return self._full_step_ns

    def is_like(self, other: "Predictor") -> bool:
        return self.has_same_steps(other) and self.cost == other.cost

    def has_same_steps(self, other: "Predictor") -> bool:
        """Whatever these take."""
        return (self.step_tokens, self.block_size, self.block_bytes) == (
            other.step_tokens,
            other.block_size,
            other.block_bytes,
        )

    def num_steps(self, num_tokens: int) -> int:
        return -(-num_tokens // self.step_tokens)

    def prefill_ns(self, num_tokens: int, num_cached: int) -> int:
        """Of that many tokens behind `num_cached` others, alone on the worker, in equal steps."""
        steps = self.num_steps(num_tokens)
        pairs = num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2
        kv = num_cached + (num_tokens + num_tokens // steps) // 2
        return steps * self._formula.ns(num_tokens // steps, 1, 1, pairs // steps, kv)

    def backlog_ns(self, num_tokens: int) -> int:
        """Of prefill of which nothing but its size is known."""
        return self.prefill_ns(num_tokens, 0) if num_tokens > 0 else 0

    def output_extra_ns(self, num_seqs: int, num_kv_tokens: int) -> int:
        """By which each output token comes later, beside that many others that decode."""
        n = num_seqs + 1
        return self._formula.ns(n, n, n, num_kv_tokens, num_kv_tokens) - self._output_ns

    def step_extra_ns(self, num_seqs: int, num_kv_tokens: int) -> int:
        """By which each full step of prefill takes longer, beside that many others that decode."""
        n = self.step_tokens + num_seqs
        mixed_ns = self._formula.ns(n, num_seqs, num_seqs, num_kv_tokens, num_kv_tokens)
        return mixed_ns - self._full_step_ns

    def fetch_ns(self, num_blocks: int, link: str) -> int | None:
        """Of blocks from another worker; None where they cannot be moved, or not over this link."""
        if not self.block_bytes or link not in self.cost.links:
            return None
        return self.cost.copy_ns(num_blocks * self.block_bytes, link)


class Quote(NamedTuple):
    """The least that a request is predicted to cost."""

    worker_id: WorkerId  # where
    total_ns: float
    terms: "Terms"


class Terms:
    """What depends on the hit alone, for workers that are alike."""

    __slots__ = ("num_fetched", "num_steps", "num_uncached", "prefill_ns", "transfer_ns", "ttft_ns")

    def __init__(
        self,
        predictor: Predictor,
        num_tokens: int,
        num_blocks: int,
        num_fetched: int = 0,
        transfer_ns: int = 0,
    ) -> None:
        """Of `num_blocks` leading blocks that are there, `num_fetched` by a transfer."""
        # The last known token is always computed: its logits choose the next one.
        num_cached = min(num_blocks * predictor.block_size, num_tokens - 1)
        self.num_uncached = num_tokens - num_cached
        self.num_fetched = num_fetched
        self.num_steps = predictor.num_steps(self.num_uncached)
        self.prefill_ns = predictor.prefill_ns(self.num_uncached, num_cached)
        self.transfer_ns = transfer_ns
        self.ttft_ns = self.prefill_ns + transfer_ns
