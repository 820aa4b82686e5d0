"""What became of one sequence, and how its latencies are judged."""

import msgspec

from headrace.core.base.metrics import Metric, find_excesses, has_answer, tpot_ns
from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import NS_PER_MS, Ns, SeqId
from headrace.core.telemetry.parts import Cause, TimeParts

# Upper bounds of the ITL histogram's buckets; one more bucket holds what is longer.
ITL_BOUNDS_NS = tuple(
    Ns(round(ms * NS_PER_MS))
    for ms in (
        *(1, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 50, 75),
        *(100, 150, 200, 300, 500, 750, 1000, 2500, 5000, 10_000),
    )
)


class ItlSummary(msgspec.Struct, frozen=True):
    """The gaps between a sequence's tokens."""

    count: int
    sum_ns: Ns
    max_ns: Ns
    histogram: tuple[int, ...]  # gaps up to each of ITL_BOUNDS_NS, and beyond


class SloMiss(msgspec.Struct, frozen=True):
    """A limit that was not kept, and what took most of the interval that exceeded it."""

    metric: Metric
    limit_ns: float
    actual_ns: float
    cause: Cause


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence from its arrival at the server to its end. `time.total_ns == e2e_ns`, exactly.

    A request of n choices has n records. None = it never came to that.
    """

    request_id: str
    seq_id: SeqId
    arrived_ns: Ns
    admitted_ns: Ns | None  # first
    first_token_ns: Ns | None
    finished_ns: Ns
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    ttft_ns: Ns | None
    tpot_ns: float | None
    e2e_ns: Ns
    itl: ItlSummary
    slo: Slo  # the request's own limits, and the default ones where it states none
    time: TimeParts
    ttft_time: TimeParts | None  # up to the first token
    worst_gap_time: TimeParts | None  # within the longest gap
    good: bool = False
    misses: tuple[SloMiss, ...] = ()

    @property
    def max_itl_ns(self) -> Ns | None:
        return self.itl.max_ns if self.itl.count else None

    def judged(self) -> "RequestRecord":
        """The same with `good` and `misses` as its latencies and limits demand."""
        misses = tuple(
            SloMiss(
                miss.metric,
                miss.limit_ns,
                miss.actual_ns,
                self.main_cause(miss.metric),
            )
            for miss in find_excesses(self, self.slo)
        )
        return msgspec.structs.replace(self, good=has_answer(self) and not misses, misses=misses)

    def main_cause(self, metric: Metric) -> Cause:
        """What took most of the interval that a limit of this latency is compared with."""
        return self._interval(metric).main_cause

    def with_client_wait(self, wait_ns: Ns) -> "RequestRecord":
        """The same for a client that read so slowly that the last token left `wait_ns` later."""
        time = msgspec.structs.replace(
            self.time, client_backpressure_ns=Ns(self.time.client_backpressure_ns + wait_ns)
        )
        e2e = Ns(self.e2e_ns + wait_ns)
        tpot = None
        if self.ttft_ns is not None:
            tpot = tpot_ns(e2e, self.ttft_ns, self.num_output_tokens)
        return msgspec.structs.replace(
            self, finished_ns=Ns(self.finished_ns + wait_ns), e2e_ns=e2e, tpot_ns=tpot, time=time
        ).judged()

    def _interval(self, metric: Metric) -> TimeParts:
        match metric:
            case Metric.TTFT:
                return self.time if self.ttft_time is None else self.ttft_time
            case Metric.ITL if self.worst_gap_time is not None:
                return self.worst_gap_time
            case Metric.TPOT if self.ttft_time is not None:
                return self.time - self.ttft_time
            case _:
                return self.time
