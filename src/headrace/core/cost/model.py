"""The cost model that every part of headrace asks."""

from typing import Protocol

import msgspec

from headrace.core.base.plan import SeqStep, StepPlan
from headrace.core.base.types import Ns


class StepShape(msgspec.Struct, frozen=True):
    """All that a step's duration is predicted from. Shapes of shares add up to the step's."""

    num_tokens: int  # rows of the forward pass
    num_seqs: int
    num_logit_rows: int
    num_attention_pairs: int  # sum over tokens of the KV positions each attends to
    num_kv_tokens: (
        int  # sum over sequences of the KV length after the step (bytes read by attention)
    )

    @staticmethod
    def of(plan: StepPlan) -> "StepShape":
        tokens = pairs = kv = logits = 0
        for seq in plan.seqs:
            n = len(seq.tokens)
            tokens += n
            pairs += n * seq.start + n * (n + 1) // 2
            kv += seq.start + n
            logits += n if seq.prompt_logprobs is not None else int(seq.sample is not None)
        return StepShape(tokens, len(plan.seqs), logits, pairs, kv)

    @staticmethod
    def of_share(seq: SeqStep, skip: int = 0) -> "StepShape":
        """One sequence's share alone, without its first `skip` tokens."""
        n, start = len(seq.tokens) - skip, seq.start + skip
        logits = n if seq.prompt_logprobs is not None else int(seq.sample is not None)
        return StepShape(n, 1, logits, n * start + n * (n + 1) // 2, start + n)

    def or_more(self, other: "StepShape") -> "StepShape":
        """Each figure as large as the larger of both."""
        both = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return StepShape(*[mine if mine > its else its for mine, its in both])

    def beyond(self, seen: "StepShape") -> list[str]:
        """In words, which figures are more than a twentieth larger than those that were seen."""
        found = []
        for name, most in msgspec.structs.asdict(self).items():
            if most > 1.05 * (limit := getattr(seen, name)):
                what = name.removeprefix("num_").replace("_", " ")
                found.append(f"steps of {most:,} {what}: seen up to {limit:,}")
        return found

    def __add__(self, other: "StepShape") -> "StepShape":
        return StepShape(
            self.num_tokens + other.num_tokens,
            self.num_seqs + other.num_seqs,
            self.num_logit_rows + other.num_logit_rows,
            self.num_attention_pairs + other.num_attention_pairs,
            self.num_kv_tokens + other.num_kv_tokens,
        )

    def __sub__(self, other: "StepShape") -> "StepShape":
        return StepShape(
            self.num_tokens - other.num_tokens,
            self.num_seqs - other.num_seqs,
            self.num_logit_rows - other.num_logit_rows,
            self.num_attention_pairs - other.num_attention_pairs,
            self.num_kv_tokens - other.num_kv_tokens,
        )


class CostModel(Protocol):
    def step_ns(self, shape: StepShape) -> Ns:
        """Predicted duration of a step; at least 1."""
        ...

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        """Predicted duration of a KV copy over the named link."""
        ...
