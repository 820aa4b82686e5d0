"""The numbered changes of one worker's prefix cache: what is missing, what came twice.

Decides what is applied to the index, and when a snapshot is needed; refuses to wait for anything:
until the snapshot is there, an index with gaps costs hits and nothing else.
"""

from typing import Final

from headrace.core.base.events import KvChange
from headrace.core.base.types import NS_PER_S, Ns

Changes = tuple[KvChange, ...]

ASK_AGAIN_NS: Final = NS_PER_S  # a request for a snapshot, or the snapshot, may be lost too
MAX_KEPT_BLOCKS: Final = 100_000  # in changes that came while a snapshot was on its way


class KvFeed:
    __slots__ = ("_asked_ns", "_kept", "_num_kept", "next_seq_no")

    def __init__(self) -> None:
        self.next_seq_no = 0
        self._asked_ns: Ns | None = None  # for a snapshot that has not come
        self._kept: list[tuple[int, Changes]] = []  # since it was asked for
        self._num_kept = 0

    @property
    def is_whole(self) -> bool:
        return self._asked_ns is None

    def take(self, now: Ns, first_seq_no: int, changes: Changes) -> tuple[Changes, bool]:
        """The changes that were not seen before, and whether to ask for a snapshot now."""
        end = first_seq_no + len(changes)
        if first_seq_no == self.next_seq_no and self._asked_ns is None:
            self.next_seq_no = end
            return changes, False
        has_gap = first_seq_no > self.next_seq_no
        fresh = changes[max(0, self.next_seq_no - first_seq_no) :]
        self.next_seq_no = max(self.next_seq_no, end)
        if self.is_whole:
            if not has_gap:
                return fresh, False
            self._asked_ns = now
            asks = True
        else:
            asks = now - (self._asked_ns or 0) >= ASK_AGAIN_NS
        if asks:
            self._asked_ns = now
        if self._num_kept < MAX_KEPT_BLOCKS:
            self._kept.append((first_seq_no, changes))
            self._num_kept += sum([len(change.names) for change in changes])
        return fresh, asks

    def restart(self, now: Ns, seq_no: int) -> tuple[list[Changes], bool]:
        """A snapshot of all before `seq_no` has come: what to apply upon it, and whether to ask for
        another one.
        """
        newest, kept = self.next_seq_no, sorted(self._kept, key=lambda entry: entry[0])
        self.next_seq_no = seq_no
        self._asked_ns, self._kept, self._num_kept = None, [], 0
        later: list[Changes] = []
        for first_seq_no, changes in kept:
            if first_seq_no > self.next_seq_no:
                break
            later.append(changes[self.next_seq_no - first_seq_no :])
            self.next_seq_no = max(self.next_seq_no, first_seq_no + len(changes))
        if self.next_seq_no < newest:
            # The snapshot is older than changes that were seen and are no longer here.
            self.next_seq_no = newest
            self._asked_ns = now
        return later, not self.is_whole
