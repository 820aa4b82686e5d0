"""What a front end adds: tokens that are moments, the load both ways, and the table."""

import queue
from io import StringIO

import pytest
from rich.console import Console

from headrace.bench.clocked import STEP_NS, UNIT_NS, ClockedExecutor, Moments
from headrace.bench.front import FrontReport, measure_front
from headrace.bench.loads import Spread
from headrace.bench.streams import Delays
from headrace.bench.tables import front_table
from headrace.core.base.events import Arrive, StepDone, StepFailed
from headrace.core.base.plan import SampleSpec, SeqStep, StepPlan
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import BlockId, Ns, SeqId, StepId
from support.fake_engine import byte_tokenizer


def test_a_token_says_how_long_its_moment_is_past() -> None:
    tokenizer = byte_tokenizer()
    moments = Moments(tokenizer)
    for moment_ns in (0, 5 * UNIT_NS, 100_007 * UNIT_NS):
        token = moments.token(moment_ns)
        assert tokenizer.bytes_of([token], skip_special=True).isascii()
        for age in (0, 1, 100):
            assert moments.since_ns(token, moment_ns + age * UNIT_NS) == age * UNIT_NS


def step(seq_id: int, *, is_last: bool = True) -> SeqStep:
    sample = SampleSpec(SamplingParams(), 1) if is_last else None
    return SeqStep(SeqId(seq_id), 0, (1,), (BlockId(0),), sample)


def test_the_first_token_is_the_arrival_and_the_next_the_end_of_its_step() -> None:
    executor, moments = ClockedExecutor(), Moments(byte_tokenizer())
    ends: queue.SimpleQueue[StepDone | StepFailed] = queue.SimpleQueue()
    try:
        executor.begin(moments)
        arrived = Ns(30 * UNIT_NS)
        spec = SeqSpec(seq_id=SeqId(7), request_id="r", prompt_tokens=(1,), params=SamplingParams())
        executor.observe(arrived, Arrive((spec,)), ())
        for number, is_last in enumerate((False, True)):
            plan = StepPlan(StepId(number), (step(7, is_last=is_last), step(8)))
            executor.start(plan, ends.put)
        results = []
        for _ in range(2):
            end = ends.get(timeout=10)
            assert isinstance(end, StepDone)
            assert end.result.elapsed_ns == STEP_NS
            results.append([one.tokens for one in end.result.seqs])
    finally:
        executor.close()
    assert results[0][0] == ()
    assert results[1][0] == (moments.token(arrived),)
    assert len(results[0][1]) == len(results[1][1]) == 1


def test_the_table_says_what_is_added() -> None:
    report = FrontReport(
        num_workers=4,
        num_streams=200,
        events_per_s=2000.0,
        alone_cpu_us_per_event=180.0,
        cpu_us_per_event=200.0,
        alone=Delays(request_ms=Spread(2.0, 3.0, 4.0), event_ms=Spread(10.0, 11.0, 20.0)),
        through=Delays(request_ms=Spread(3.5, 3.0, 5.0), event_ms=Spread(6.0, 7.0, 25.0)),
    )
    console = Console(width=120, record=True, file=StringIO())
    console.print(front_table(report))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["request,", "added", "1.50", "0.00", "1.00"] in lines
    assert ["event,", "added", "-4.00", "-4.00", "5.00"] in lines


@pytest.mark.slow
def test_the_same_load_both_ways() -> None:
    report = measure_front(1, 2, 1)
    for delays in (report.alone, report.through):
        assert delays.event_ms.p50 > 0
        assert delays.request_ms.p50 > 0
    assert min(report.alone_cpu_us_per_event, report.cpu_us_per_event) > 0
