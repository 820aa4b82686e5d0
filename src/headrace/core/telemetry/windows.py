"""Goodput over sliding windows: how many requests a second met their limits lately, by class."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from headrace.core.base.events import (
    Admitted,
    Arrive,
    Emit,
    EngineEffect,
    EngineEvent,
    Finish,
    Reject,
)
from headrace.core.base.metrics import per_second
from headrace.core.base.request import SeqSpec
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.telemetry.record import RequestRecord

BUCKET_NS = NS_PER_S
WINDOWS_S = (10, 60, 600)
NUM_BUCKETS = WINDOWS_S[-1]
MAX_CLASSES = 16  # further ones are counted together
OTHER_CLASS = "other"

# The places of the sums in a bucket.
FINISHED, GOOD, REFUSED, PROMPT_TOKENS, OUTPUT_TOKENS = range(5)


class WindowRates(msgspec.Struct, frozen=True, kw_only=True):
    """What happened within a window, per second of it."""

    window_s: float  # what the window covers: less than was asked for only before that has passed
    num_finished: int
    num_good: int
    num_refused: int
    goodput_per_s: float  # good requests
    finished_per_s: float
    refused_per_s: float  # for want of room (429, 503); a client's own mistakes do not count
    attainment: float | None  # good of finished and refused; None = there were none
    prompt_tokens_per_s: float  # admitted; cached ones included
    output_tokens_per_s: float  # sent


def one_class(spec: SeqSpec) -> str:
    return "default"


class GoodputWindow:
    """Feed it every event, and the record of each sequence that ended, then or later.

    One thread feeds it; any may query. Sums are kept in buckets of one second, in a ring for each
    class; a query covers whole buckets and the one that has begun.
    """

    def __init__(self, class_of: Callable[[SeqSpec], str] = one_class) -> None:
        self._class_of = class_of
        self._rings: dict[str, _Ring] = {}
        self._ring_by_seq: dict[SeqId, _Ring] = {}
        self._waiting: dict[SeqId, int] = {}  # prompt tokens of sequences never admitted
        self._first_ns: Ns | None = None

    def classes(self) -> Iterable[str]:
        return tuple(self._rings)

    def observe(
        self,
        now: Ns,
        event: EngineEvent,
        effects: Sequence[EngineEffect],
    ) -> None:
        if self._first_ns is None:
            self._first_ns = now
        if isinstance(event, Arrive):
            for spec in event.seqs:
                self._ring_by_seq[spec.seq_id] = self._ring(self._class_of(spec))
                self._waiting[spec.seq_id] = len(spec.prompt_tokens)
        for effect in effects:
            match effect:
                case Admitted(seq_id) if seq_id in self._waiting:
                    num_prompt = self._waiting.pop(seq_id)
                    self._ring_by_seq[seq_id].add(now, PROMPT_TOKENS, num_prompt)
                case Emit(seq_id, tokens) if tokens and seq_id in self._ring_by_seq:
                    self._ring_by_seq[seq_id].add(now, OUTPUT_TOKENS, len(tokens))
                case Reject(seq_id, status):
                    ring = self._forget(seq_id)
                    if ring is not None and status in (429, 503):
                        ring.add(now, REFUSED, 1)
                case Finish(seq_id):
                    self._waiting.pop(seq_id, None)

    def count(self, now: Ns, record: RequestRecord) -> None:
        """The end of a sequence, once; `now` is when it counts."""
        ring = self._forget(record.seq_id)
        if ring is not None:
            ring.add(now, FINISHED, 1)
            ring.add(now, GOOD, int(record.good))

    def query(self, now: Ns, window_s: int, slo_class: str | None = None) -> WindowRates:
        """The last `window_s` seconds (1 to 600) of one class, or of all."""
        if not 1 <= window_s <= NUM_BUCKETS:
            raise ValueError(f"window of {window_s} s is not within 1 to {NUM_BUCKETS}")
        rings = self._rings.copy()  # at once: a class may come meanwhile
        sums = [0] * 5
        for name, ring in rings.items():
            if slo_class is None or name == slo_class:
                ring.collect(now, window_s, sums)
        finished, good, refused, prompt, output = sums
        # The bucket that has begun, and whole ones before it; never less than one bucket.
        covered_ns = (window_s - 1) * BUCKET_NS + now % BUCKET_NS
        lived_ns = 0 if self._first_ns is None else now - self._first_ns
        span_ns = Ns(max(min(covered_ns, lived_ns), BUCKET_NS))
        judged = finished + refused
        return WindowRates(
            window_s=span_ns / NS_PER_S,
            num_finished=finished,
            num_good=good,
            num_refused=refused,
            goodput_per_s=per_second(good, span_ns),
            finished_per_s=per_second(finished, span_ns),
            refused_per_s=per_second(refused, span_ns),
            attainment=good / judged if judged else None,
            prompt_tokens_per_s=per_second(prompt, span_ns),
            output_tokens_per_s=per_second(output, span_ns),
        )

    def _ring(self, name: str) -> "_Ring":
        ring = self._rings.get(name)
        if ring is None:
            if len(self._rings) >= MAX_CLASSES:
                name = OTHER_CLASS
            # No `setdefault` for a known class: a ring of its own would be made for every sequence.
            ring = self._rings.setdefault(name, _Ring())
        return ring

    def _forget(self, seq_id: SeqId) -> "_Ring | None":
        self._waiting.pop(seq_id, None)
        return self._ring_by_seq.pop(seq_id, None)


class _Ring:
    """Five sums for each of the last seconds; a bucket is cleared when its place is used again."""

    def __init__(self) -> None:
        self._seconds = [-1] * NUM_BUCKETS  # which second a bucket is of
        self._sums = [[0] * 5 for _ in range(NUM_BUCKETS)]

    def add(self, now: Ns, place: int, count: int) -> None:
        second = now // BUCKET_NS
        bucket = second % NUM_BUCKETS
        if self._seconds[bucket] != second:
            # In this order: a reader may come between, and must not take old sums for new.
            self._sums[bucket] = [0] * 5
            self._seconds[bucket] = second
        self._sums[bucket][place] += count

    def collect(self, now: Ns, window_s: int, into: list[int]) -> None:
        last = now // BUCKET_NS
        for second in range(max(0, last - window_s + 1), last + 1):
            bucket = second % NUM_BUCKETS
            if self._seconds[bucket] == second:
                for place, count in enumerate(self._sums[bucket]):
                    into[place] += count
