"""The parts of claims on cases with known answers; claims themselves are slow."""

import pytest

from headrace.core.base.types import Ns, SeqId
from headrace.core.workload.traces import TraceRequest
from headrace.plan.presets import ModelRow
from headrace.plan.steps import prefill_shape
from headrace.sim.capacity import Crew
from headrace.sim.claims import (
    OPT_13B,
    OPT_66B,
    Alone,
    Effort,
    batching,
    cost_of,
    device,
    distserve,
    span_s,
    splitwise,
)
from headrace.sim.claims_traces import block_hits, hits, routing
from support.records import record_of


def trace_of(*blocks: tuple[int, ...]) -> tuple[TraceRequest, ...]:
    return tuple(
        TraceRequest(
            arrival_s=float(i),
            prompt_tokens=512 * len(own),
            output_tokens=1,
            blocks=own,
            block_tokens=512,
        )
        for i, own in enumerate(blocks)
    )


def test_a_cache_that_is_too_small_forgets_what_was_used_longest_ago() -> None:
    trace = trace_of((1, 2), (3,), (1, 2), (4, 1))
    assert block_hits(trace, 10) == 2 / 7  # of the last one nothing: it begins otherwise
    assert block_hits(trace, 2) == 0.0
    [claim] = hits(Effort(trace=trace))
    assert claim.ours == pytest.approx(2 / 7 * 100)


@pytest.mark.parametrize(("row", "billions"), [(OPT_13B, 12.85), (OPT_66B, 65.72)])
def test_shapes_have_the_parameters_that_are_published(row: ModelRow, billions: float) -> None:
    """12 · layers · hidden², and the table."""
    shape = row.build()
    layers = 12 * shape.num_layers * shape.hidden**2
    assert (layers + 50272 * shape.hidden) / 1e9 == pytest.approx(billions, rel=0.01)


def test_who_is_alone_is_not_slowed_down() -> None:
    cost = cost_of("meta-llama/Llama-2-70b", "A100 SXM 80GB", 8)
    first_ns = cost.step_ns(prefill_shape(1, 100))
    record = record_of(
        SeqId(0), num_prompt_tokens=100, ttft_ns=Ns(2 * first_ns), e2e_ns=Ns(3 * first_ns)
    )
    assert dict(Alone(cost).slowdowns(record)) == pytest.approx({"ttft": 2.0, "e2e": 3.0})


def test_a_batch_lasts_as_long_as_its_longest_answer() -> None:
    crew = Crew(device=device(OPT_13B, "A100 SXM 80GB", 1), num_workers=1, max_seqs=2)
    one_s, two_s = span_s(crew, [20], 64), span_s(crew, [20, 2], 64)
    assert one_s < two_s < 1.5 * one_s
    # The short ones follow each other beside the long one.
    together_s = span_s(crew, [20, 2, 2, 2], 64)
    assert together_s < two_s + span_s(crew, [2, 2], 64)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_continuous_batching_is_some_times_as_fast() -> None:
    eight, many, short = batching(Effort(num_requests=600))
    assert 1.8 < eight.ours < 2.8
    assert 1.8 < many.ours < short.ours < 5.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_instance_serves_less_where_prompts_are_long_against_their_limit() -> None:
    chat, code = distserve(Effort(num_requests=100))
    assert chat.ours > 2.0
    assert 0.5 < code.ours < 1.5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_knowing_the_caches_halves_the_wait_of_sessions() -> None:
    [sessions] = routing(Effort(num_requests=300))
    assert sessions.ours > 1.5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_same_machines_serve_about_as_much_apart() -> None:
    [claim] = splitwise(Effort(num_requests=80))
    assert 0.5 < claim.ours < 3.0
