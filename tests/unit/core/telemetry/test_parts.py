"""Time parts: names, sums, the main cause; records survive the wire."""

import msgspec

from headrace.core.base.metrics import Metric
from headrace.core.base.request import FinishReason, Slo
from headrace.core.base.types import NS_PER_MS, Ns, SeqId
from headrace.core.telemetry import Cause, ItlSummary, RequestRecord, SloMiss, TimeParts
from headrace.core.telemetry.record import ITL_BOUNDS_NS


def test_every_cause_has_its_field_in_order() -> None:
    assert TimeParts.__struct_fields__ == tuple(f"{cause}_ns" for cause in Cause)
    parts = TimeParts(*map(Ns, range(10)))
    assert parts.by_cause()[Cause.CLIENT_BACKPRESSURE] == 9
    assert parts.by_cause()[Cause.ROUTER_WAIT] == 0
    assert parts.total_ns == 45


def test_the_main_cause_is_the_largest_part_and_the_earliest_of_equals() -> None:
    assert TimeParts(queue_ns=Ns(4), decode_ns=Ns(5)).main_cause is Cause.DECODE
    assert TimeParts(queue_ns=Ns(5), decode_ns=Ns(5)).main_cause is Cause.QUEUE


def test_an_interval_less_its_beginning() -> None:
    whole = TimeParts(queue_ns=Ns(4), decode_ns=Ns(5))
    assert whole - TimeParts(queue_ns=Ns(4), decode_ns=Ns(2)) == TimeParts(decode_ns=Ns(3))


def test_histogram_bounds_rise() -> None:
    assert list(ITL_BOUNDS_NS) == sorted(set(ITL_BOUNDS_NS))
    assert all(isinstance(bound, int) for bound in ITL_BOUNDS_NS)


def test_a_record_survives_the_wire() -> None:
    record = RequestRecord(
        request_id="r",
        seq_id=SeqId(1),
        arrived_ns=Ns(5),
        admitted_ns=Ns(6),
        first_token_ns=None,
        finished_ns=Ns(20 * NS_PER_MS),
        reason=FinishReason.CANCELLED,
        num_prompt_tokens=3,
        num_output_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        ttft_ns=None,
        tpot_ns=None,
        e2e_ns=Ns(20 * NS_PER_MS - 5),
        itl=ItlSummary(0, Ns(0), Ns(0), (0,) * 22),
        slo=Slo(ttft_ms=1.0),
        time=TimeParts(queue_ns=Ns(20 * NS_PER_MS - 5)),
        ttft_time=None,
        worst_gap_time=None,
    ).judged()
    assert record.misses == (SloMiss(Metric.TTFT, 1e6, 20 * NS_PER_MS - 5, Cause.QUEUE),)
    assert msgspec.json.decode(msgspec.json.encode(record), type=RequestRecord) == record
