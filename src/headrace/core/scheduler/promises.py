"""Blocks that sequences were promised when they were admitted, and have not got yet.

Decides what of the KV pool is free for whom; refuses to know who is admitted or preempted.
"""

from headrace.core.base.errors import InvariantError
from headrace.core.base.types import SeqId
from headrace.core.config.schema import SchedulerConfig
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.policies import is_protected
from headrace.core.scheduler.sequence import Sequence
from headrace.core.scheduler.step import StepDraft


class Promises:
    """Of the sequences in `running`, which is the scheduler's."""

    def __init__(
        self, config: SchedulerConfig, kv: KvManager, running: dict[SeqId, Sequence]
    ) -> None:
        self._config = config
        self._kv = kv
        self._running = running

    def num_needed(self, seq: Sequence) -> int:
        """Blocks that its promise takes out of what is available, now or later."""
        known = self._kv.match(seq.chain, seq.reusable_tokens)
        unheld = self._kv.num_unheld_of(seq.chain, known)
        return self._kv.blocks_for(seq.promised_tokens) - known + unheld

    def num_left(self, seq: Sequence) -> int:
        """Blocks that it was promised and does not hold yet."""
        if seq.promised_tokens <= seq.num_planned:
            return 0
        return max(0, self._kv.blocks_for(seq.promised_tokens) - self._kv.num_held(seq.seq_id))

    @property
    def num_blocks(self) -> int:
        """The same, of all that run."""
        return sum(self.num_left(seq) for seq in self._running.values())

    @property
    def num_kept(self) -> int:
        """Of these, the blocks that nobody else may take, as they were promised for good."""
        running = self._running.values()
        return sum(self.num_left(seq) for seq in running if is_protected(self._config, seq))

    def grow(self, seq: Sequence, num_tokens: int, step: StepDraft) -> bool:
        """Reserve what is not promised to protected sequences, of which this may be one."""
        num_missing = self._kv.blocks_for(num_tokens) - self._kv.num_held(seq.seq_id)
        if num_missing <= 0:
            return True
        if is_protected(self._config, seq):
            if not self._kv.reserve(seq.seq_id, num_tokens):
                raise InvariantError(
                    "promised blocks are gone", seq_id=seq.seq_id, num_missing=num_missing
                )
            step.num_kept = None
            return True
        if step.num_kept is None:
            step.num_kept = self.num_kept
        has_room = num_missing <= self._kv.num_available - step.num_kept
        return has_room and self._kv.reserve(seq.seq_id, num_tokens)
