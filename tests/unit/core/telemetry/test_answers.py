"""Records wait until their answers have left, and slow clients are charged for what they took."""

import pytest

from headrace.core.base.events import Arrive, Cancel, EngineEffect, Reject
from headrace.core.base.metrics import Metric
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.telemetry import (
    Answers,
    Cause,
    ClientWait,
    ItlSummary,
    RequestRecord,
    TimeParts,
)
from support.engine_script import MS

NOTHING = Cancel(SeqId(-1))
SLOW = ClientWait(Ns(90 * MS), Ns(350 * MS))


def arrive(answers: Answers, *ids: int, request_id: str = "r", rejected: bool = False) -> None:
    specs = tuple(
        SeqSpec(seq_id=SeqId(i), request_id=request_id, prompt_tokens=(1,), params=SamplingParams())
        for i in ids
    )
    words: list[EngineEffect] = [Reject(SeqId(i), 503, "full", "") for i in ids if rejected]
    assert answers.observe(Arrive(specs), words, []) == []


def record(seq_id: int, *, request_id: str = "r", finished_ms: int = 100) -> RequestRecord:
    """It decoded from its first token, at 20 ms, to its end."""
    first, end = Ns(20 * MS), Ns(finished_ms * MS)
    return RequestRecord(
        request_id=request_id,
        seq_id=SeqId(seq_id),
        arrived_ns=Ns(0),
        admitted_ns=Ns(0),
        first_token_ns=first,
        finished_ns=end,
        reason=FinishReason.LENGTH,
        num_prompt_tokens=1,
        num_output_tokens=9,
        num_cached_tokens=0,
        num_preemptions=0,
        ttft_ns=first,
        tpot_ns=(end - first) / 8,
        e2e_ns=end,
        itl=ItlSummary(8, Ns(end - first), Ns(10 * MS), ()),
        slo=Slo(tpot_ms=15.0, e2e_ms=300.0),
        time=TimeParts(own_prefill_ns=first, decode_ns=Ns(end - first)),
        ttft_time=TimeParts(own_prefill_ns=first),
        worst_gap_time=TimeParts(decode_ns=Ns(10 * MS)),
    ).judged()


def end(answers: Answers, *records: RequestRecord) -> list[RequestRecord]:
    return answers.observe(NOTHING, [], records)


def test_a_client_that_keeps_up_changes_nothing() -> None:
    answers = Answers()
    arrive(answers, 0)
    assert end(answers, record(0)) == []
    assert answers.leave("r", None) == [record(0)]
    assert answers.num_known == 0


def test_a_slow_client_pays_for_what_came_after_the_end() -> None:
    answers = Answers()
    arrive(answers, 0)
    end(answers, record(0))
    (late,) = answers.leave("r", SLOW)
    assert record(0).good
    assert not late.good
    assert late.finished_ns == late.e2e_ns == late.time.total_ns == 350 * MS
    assert late.time.client_backpressure_ns == 250 * MS
    assert {(miss.metric, miss.cause) for miss in late.misses} == {
        (Metric.TPOT, Cause.CLIENT_BACKPRESSURE),
        (Metric.E2E, Cause.CLIENT_BACKPRESSURE),
    }


@pytest.mark.parametrize(("finished_ms", "wait_ms"), [(50, 260), (90, 260), (340, 10), (400, 0)])
def test_only_the_time_after_the_end_is_the_clients(finished_ms: int, wait_ms: int) -> None:
    assert SLOW.after(Ns(finished_ms * MS)) == wait_ms * MS
    answers = Answers()
    arrive(answers, 0)
    end(answers, record(0, finished_ms=finished_ms))
    (late,) = answers.leave("r", SLOW)
    assert late.time.client_backpressure_ns == wait_ms * MS


def test_an_answer_may_leave_before_its_sequences_end() -> None:
    answers = Answers()
    arrive(answers, 0, 1)
    assert answers.leave("r", SLOW) == []
    (first,) = end(answers, record(1, finished_ms=340))
    assert first.time.client_backpressure_ns == 10 * MS
    assert answers.num_known == 1
    assert end(answers, record(0, finished_ms=400)) == [record(0, finished_ms=400)]
    assert answers.num_known == 0


def test_some_may_end_before_it_leaves_and_some_after() -> None:
    answers = Answers()
    arrive(answers, 0, 1)
    assert end(answers, record(0)) == []
    assert [one.seq_id for one in answers.leave("r", None)] == [0]
    assert [one.seq_id for one in end(answers, record(1))] == [1]
    assert answers.num_known == 0


def test_answers_do_not_wait_for_each_other() -> None:
    answers = Answers()
    arrive(answers, 0, request_id="a")
    arrive(answers, 1, request_id="b")
    assert end(answers, record(0, request_id="a"), record(1, request_id="b")) == []
    assert [one.request_id for one in answers.leave("b", None)] == ["b"]
    assert [one.request_id for one in answers.leave("a", None)] == ["a"]


def test_what_never_came_to_a_sequence_is_not_remembered() -> None:
    answers = Answers()
    assert answers.leave("refused by the server", None) == []
    arrive(answers, 0, 1, rejected=True)
    assert answers.leave("r", SLOW) == []
    assert answers.num_known == 0
    arrive(answers, 2, request_id="refused by the server")
    assert end(answers, record(2, request_id="refused by the server")) == []
