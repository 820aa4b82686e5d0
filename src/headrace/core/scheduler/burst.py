"""Bursts: who came together to an idle engine, and still waits for a first token.

An ITL target protects those who read from those who come later. Who comes together has nobody to
protect yet: there, giving way to the next tokens of the first ones only keeps the others waiting
for their first.
"""

from typing import Final

from headrace.core.base.types import NS_PER_MS, Ns, SeqId
from headrace.core.config.schema import SchedulerConfig
from headrace.core.scheduler.sequence import Sequence

# After the first one. Clients who send together arrive over tens of milliseconds.
BURST_NS: Final = 250 * NS_PER_MS


class Burst:
    """Of one scheduler: the last one."""

    def __init__(self) -> None:
        self._seqs: dict[SeqId, Sequence] = {}
        self._until = Ns(0)

    def itl_ms(self, config: SchedulerConfig) -> float:
        """The target of requests that state none: while somebody waits for a first token, that of
        steps with nobody to protect. No long prompt counts, since everybody would give way to it
        for as long as it takes.
        """
        if any(not seq.is_long for seq in self._seqs.values()):
            return max(config.itl_target_ms, config.long_step_ms)
        return config.itl_target_ms

    def arrive(self, seq: Sequence, now: Ns, *, is_idle: bool) -> None:
        """A sequence comes; `is_idle`: nobody else runs or waits. One that comes again after a
        preemption counts for nothing.
        """
        if seq.num_preemptions:
            return
        if is_idle:
            self._until = Ns(now + BURST_NS)
        if now <= self._until:
            self._seqs[seq.seq_id] = seq

    def leave(self, seq_id: SeqId) -> None:
        """It has its first token, or has ended. Idempotent."""
        self._seqs.pop(seq_id, None)
