"""A record of a request that ran on several workers: their causes, in the front end's times."""

from headrace.core.base.events import Admitted, Arrive, Emit, Finish, Preempted
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_MS, Ns, SeqId
from headrace.core.telemetry import Cause, ClusterTelemetry, RequestRecord, TimeParts
from headrace.core.telemetry.record import ITL_BOUNDS_NS, ItlSummary
from support.records import record_of

SEQ = SeqId(3)
NO_ITL = ItlSummary(0, Ns(0), Ns(0), (0,) * (len(ITL_BOUNDS_NS) + 1))


def ns(ms: float) -> Ns:
    return Ns(round(ms * NS_PER_MS))


def parts(**ms: float) -> TimeParts:
    return TimeParts(**{f"{cause}_ns": ns(value) for cause, value in ms.items()})


def told(time: TimeParts, ttft: TimeParts, gap: TimeParts | None = None) -> RequestRecord:
    return record_of(SEQ, num_prompt_tokens=5, time=time, ttft_time=ttft, worst_gap_time=gap)


class Front:
    def __init__(self) -> None:
        self.telemetry = ClusterTelemetry(Slo(ttft_ms=100, itl_ms=30))
        self.see(0, arrives=True)

    def see(self, ms: float, *effects: object, arrives: bool = False) -> list[RequestRecord]:
        spec = SeqSpec(seq_id=SEQ, request_id="r", prompt_tokens=(1,) * 5, params=SamplingParams())
        return self.telemetry.observe(ns(ms), Arrive((spec,) if arrives else ()), effects)  # type: ignore[arg-type]

    def end(self, ms: float, num_output: int, num_preemptions: int = 0) -> RequestRecord:
        finish = Finish(SEQ, FinishReason.LENGTH, 5, num_output, 0, num_preemptions)
        (record,) = self.see(ms, Emit(SEQ, (9,)), finish)
        assert record.time.total_ns == record.e2e_ns == ns(ms)
        return record


def test_of_one_worker_all_causes_are_its_own_and_the_rest_is_the_way() -> None:
    front = Front()
    front.see(10, Admitted(SEQ, 0))
    front.see(204, Emit(SEQ, (7,)))
    front.telemetry.tell(
        told(
            parts(router_wait=5, own_prefill=190, decode=40),
            parts(router_wait=5, own_prefill=190),
            parts(decode=40),
        )
    )
    record = front.end(250, 2)
    assert record.time == parts(router_wait=20, own_prefill=190, decode=40)
    assert record.ttft_time == parts(router_wait=14, own_prefill=190)
    assert record.worst_gap_time == parts(router_wait=6, decode=40)
    assert [miss.cause for miss in record.misses] == [Cause.OWN_PREFILL, Cause.DECODE]


def test_a_request_that_was_handed_on_spent_its_time_at_both() -> None:
    front = Front()
    front.see(10, Admitted(SEQ, 0))
    front.see(210, Emit(SEQ, (7,)))
    # The first one's last word: readers do not hear of that end.
    front.telemetry.tell(
        told(parts(router_wait=8, own_prefill=200), parts(router_wait=8, own_prefill=200))
    )
    front.see(270, Emit(SEQ, (8,)))
    front.telemetry.tell(
        told(
            parts(router_wait=212, transfer=35, decode=40),
            parts(router_wait=212, transfer=35, decode=20),
            parts(decode=20),
        )
    )
    record = front.end(290, 3)
    assert record.time == parts(router_wait=15, own_prefill=200, transfer=35, decode=40)
    assert record.ttft_time == parts(router_wait=10, own_prefill=200)
    assert record.worst_gap_time == parts(router_wait=5, transfer=35, decode=20)
    assert [miss.cause for miss in record.misses] == [Cause.OWN_PREFILL, Cause.TRANSFER]


def test_what_a_lost_worker_knew_is_lost() -> None:
    front = Front()
    front.see(10, Admitted(SEQ, 0))
    front.see(60, Emit(SEQ, (7,)))
    front.see(100, Preempted(SEQ, "lost", 6))
    front.telemetry.tell(
        told(parts(router_wait=105, own_prefill=50), parts(router_wait=105, own_prefill=50))
    )
    record = front.end(170, 2, num_preemptions=1)
    assert record.time == parts(router_wait=120, own_prefill=50)
    assert record.ttft_ns == ns(60)
    assert record.ttft_time is not None
    assert record.ttft_time.total_ns == ns(60)


def test_an_interval_that_is_shorter_here_loses_of_its_largest_part() -> None:
    front = Front()
    front.see(100, Emit(SEQ, (7,)))
    front.telemetry.tell(told(parts(own_prefill=95, decode=60), parts(own_prefill=95)))
    assert front.end(150, 2).time == parts(own_prefill=90, decode=60)
    # Nobody asks for a record of a sequence that has ended.
    front.telemetry.tell(told(parts(), parts()))
    front.see(200, arrives=True)
    assert front.end(300, 1).time.total_ns == ns(300)
