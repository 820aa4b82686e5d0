"""The steps that are timed, as shapes, and as batches over a KV pool.

Decides which steps stand for serving; refuses to know what computes them.
"""

import msgspec

from headrace.core.base.types import BlockId
from headrace.ops.interface import StepBatch

BLOCK_TOKENS = 16


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A step of equal sequences, each with `num_tokens` tokens after `start` earlier ones."""

    name: str
    num_seqs: int = 1
    num_tokens: int = 1
    start: int = 0
    num_shared_tokens: int = 0  # first tokens that all sequences have in common; whole blocks

    @property
    def context(self) -> int:
        """Positions of a sequence after the step."""
        return self.start + self.num_tokens

    @property
    def num_step_tokens(self) -> int:
        return self.num_seqs * self.num_tokens

    @property
    def num_shared_blocks(self) -> int:
        return self.num_shared_tokens // BLOCK_TOKENS

    @property
    def num_own_blocks(self) -> int:
        """Of each sequence."""
        return -(-self.context // BLOCK_TOKENS) - self.num_shared_blocks

    @property
    def num_blocks(self) -> int:
        return self.num_shared_blocks + self.num_seqs * self.num_own_blocks

    @property
    def num_kv_tokens(self) -> int:
        """Different tokens whose keys and values the step reads, its own included."""
        own = self.context - self.num_shared_tokens
        return self.num_shared_tokens + self.num_seqs * own

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        last, first = self.context, self.start + 1
        return self.num_seqs * (first + last) * self.num_tokens // 2

    def batch(self) -> StepBatch:
        """With logits of each sequence's last row."""
        shared = [BlockId(i) for i in range(self.num_shared_blocks)]
        tables = [
            shared
            + [
                BlockId(self.num_shared_blocks + seq * self.num_own_blocks + i)
                for i in range(self.num_own_blocks)
            ]
            for seq in range(self.num_seqs)
        ]
        return StepBatch(
            tokens=[0] * self.num_step_tokens,
            token_starts=[seq * self.num_tokens for seq in range(self.num_seqs + 1)],
            positions=[self.start] * self.num_seqs,
            block_tables=tables,
            logit_rows=[(seq + 1) * self.num_tokens - 1 for seq in range(self.num_seqs)],
        )


STEPS = (
    *(
        Cell(name=f"decode {num_seqs} at {context}", num_seqs=num_seqs, start=context - 1)
        for context in (320, 1070)
        for num_seqs in (1, 8, 32)
    ),
    Cell(name="decode 32 on shared 1024", num_seqs=32, start=1024, num_shared_tokens=1024),
    Cell(name="chunk of 512 at 0", num_tokens=512),
    Cell(name="chunk of 512 at 1536", num_tokens=512, start=1536),
)
