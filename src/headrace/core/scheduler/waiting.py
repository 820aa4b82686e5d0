"""The sequences that wait, in the order in which they are looked at."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from headrace.core.base.types import Ns
from headrace.core.config.schema import SchedulerConfig
from headrace.core.kv.manager import KvManager
from headrace.core.scheduler.policies import ORDERS, STATIC_ORDERS
from headrace.core.scheduler.sequence import Sequence

# Orders that change from step to step are evaluated for this many of the longest waiting sequences
# only.
DYNAMIC_ORDER_WINDOW = 128

queue_key = attrgetter("queue_key")


class WaitingQueue:
    """By `queue_key`: the order policy's where it is static, else arrival."""

    def __init__(self, config: SchedulerConfig, kv: KvManager) -> None:
        self._config = config
        self._kv = kv
        self._order_key = ORDERS[config.order]
        self._is_static = config.order in STATIC_ORDERS
        self._seqs: list[Sequence] = []
        self.num_long = 0  # by length alone; the cache may make some of them short

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def add(self, seq: Sequence, now: Ns) -> None:
        """Let a sequence wait, at the place that its order gives it. It is long or short from now
        on, until the cache says otherwise when it is looked at.
        """
        seq.queue_key = self._order_key(seq, now, self._kv) if self._is_static else (0.0, seq.order)
        insort(self._seqs, seq, key=queue_key)
        self.num_long += self._has_long_text(seq)
        seq.is_long = self.is_long(seq)

    def remove(self, seq: Sequence) -> None:
        del self._seqs[bisect_left(self._seqs, seq.queue_key, key=queue_key)]
        self.num_long -= self._has_long_text(seq)

    def candidates(self, now: Ns) -> list[Sequence]:
        """Those that may be admitted to the next step, the first one first.

        Whoever admits looks at no more than the window and those it admits, and passes by those
        whose lane is closed.
        """
        if not self._is_static:
            oldest = self._seqs[:DYNAMIC_ORDER_WINDOW]
            return sorted(oldest, key=lambda seq: self._order_key(seq, now, self._kv))
        limit = self._config.skip_ahead_window + self._config.max_running_seqs + 1
        return self._seqs[: limit + self.num_long]

    def is_long(self, seq: Sequence) -> bool:
        """Whether a sequence that waits has much to compute beside what the cache holds."""
        if not self._has_long_text(seq):
            return False
        num_cached = self._kv.match(seq.chain, seq.reusable_tokens) * self._kv.block_size
        return len(seq.tokens) - num_cached > self._config.short_prompt_tokens

    def _has_long_text(self, seq: Sequence) -> bool:
        return len(seq.tokens) > self._config.short_prompt_tokens
