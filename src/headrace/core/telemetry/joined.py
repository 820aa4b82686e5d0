"""Records of requests that ran on workers: latencies as the front end saw them, causes as the
workers did.

A worker knows where the time went while it had a sequence, and the front end knows the rest: what
passed on the way there and back, and what a lost worker cost.
"""

from collections.abc import Sequence

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

    def __init__(self, default_slo: Slo) -> None:
        self._seen = Telemetry(default_slo, FittedCostModel.prior())
        self._told: dict[SeqId, list[RequestRecord]] = {}

    def tell(self, record: RequestRecord) -> None:
        """A worker's record of a sequence that has ended there, before the front end's readers hear
        of it, if they do: it may go on elsewhere.
        """
        if self._seen.knows(record.seq_id):
            self._told.setdefault(record.seq_id, []).append(record)

    def observe(
        self, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]
    ) -> list[RequestRecord]:
        """Records of the sequences that ended with these effects, in order."""
        records = self._seen.observe(now, event, effects)
        return [_explained(record, self._told.pop(record.seq_id, [])) for record in records]


def _explained(seen: RequestRecord, told: Sequence[RequestRecord]) -> RequestRecord:
    if not told:
        return seen
    time = told[0].time
    for later in told[1:]:
        time += _spent_there(later.time)
    ttft, gap = seen.ttft_time, seen.worst_gap_time
    # A worker that was lost took what it knew with it.
    is_whole = sum(one.num_preemptions for one in told) == seen.num_preemptions
    if is_whole and ttft is not None and told[0].ttft_time is not None:
        ttft = _filled(told[0].ttft_time, ttft.total_ns)
    if is_whole and gap is not None and (longest := _longest_gap(told)) is not None:
        gap = _filled(longest, gap.total_ns)
    return msgspec.structs.replace(
        seen, time=_filled(time, seen.time.total_ns), ttft_time=ttft, worst_gap_time=gap
    ).judged()


def _spent_there(time: TimeParts) -> TimeParts:
    """What passed before it came to a worker is in the record of the one before."""
    return msgspec.structs.replace(time, router_wait_ns=Ns(0))


def _longest_gap(told: Sequence[RequestRecord]) -> TimeParts | None:
    """Between two tokens of one worker, or from the last of one to the first of the next."""
    gaps = [one.worst_gap_time for one in told if one.worst_gap_time is not None]
    gaps += [_spent_there(one.ttft_time) for one in told[1:] if one.ttft_time is not None]
    return max(gaps, key=lambda gap: gap.total_ns, default=None)


def _filled(told: TimeParts, total_ns: Ns) -> TimeParts:
    """The workers' parts, and the rest of the interval as time on the way. An interval that is
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
