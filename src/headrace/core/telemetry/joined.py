"""Records of requests that ran on workers: latencies as the front end saw them, causes as the
workers did.

A worker knows where the time went while it had a sequence, and the front end knows the rest: what
passed on the way there and back, and what a lost worker cost.
"""

from collections.abc import Callable, Sequence

import msgspec

from headrace.core.base.events import EngineEffect, EngineEvent
from headrace.core.base.request import Slo
from headrace.core.base.types import Ns, SeqId
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.telemetry.fold import Telemetry
from headrace.core.telemetry.parts import TimeParts
from headrace.core.telemetry.record import RequestRecord


class ClusterTelemetry:
    """A Telemetry of what the front end hears, with the workers' own records beside it."""

    def __init__(
        self, default_slo: Slo, take_record: Callable[[SeqId], RequestRecord | None]
    ) -> None:
        """`take_record` gives the worker's record of a sequence that has ended, if there is one."""
        self._seen = Telemetry(default_slo, FittedCostModel.prior())
        self._take_record = take_record

    def observe(
        self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]
    ) -> list[RequestRecord]:
        """Records of the sequences that ended with these effects, in order."""
        records = self._seen.observe(now, event, effects)
        return [self._explained(record) for record in records]

    def _explained(self, seen: RequestRecord) -> RequestRecord:
        told = self._take_record(seen.seq_id)
        if told is None:
            return seen
        is_whole = told.num_preemptions == seen.num_preemptions  # it ran on one worker alone
        ttft, gap = seen.ttft_time, seen.worst_gap_time
        if is_whole and ttft is not None and told.ttft_time is not None:
            ttft = _filled(told.ttft_time, ttft.total_ns)
        if is_whole and gap is not None and told.worst_gap_time is not None:
            gap = _filled(told.worst_gap_time, gap.total_ns)
        return msgspec.structs.replace(
            seen,
            time=_filled(told.time, seen.time.total_ns),
            ttft_time=ttft,
            worst_gap_time=gap,
        ).judged()


def _filled(told: TimeParts, total_ns: Ns) -> TimeParts:
    """The worker's parts, and the rest of the interval as time on the way. An interval that is
    shorter here than there loses of its largest part.
    """
    rest_ns = total_ns - told.total_ns
    if rest_ns >= 0:
        return msgspec.structs.replace(told, router_wait_ns=Ns(told.router_wait_ns + rest_ns))
    largest = f"{told.main_cause.value}_ns"
    left_ns = getattr(told, largest) + rest_ns
    if left_ns < 0:
        return TimeParts(router_wait_ns=total_ns)
    return msgspec.structs.replace(told, **{largest: Ns(left_ns)})
