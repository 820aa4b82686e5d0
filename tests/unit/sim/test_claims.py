"""The parts of claims on cases with known answers; claims themselves are slow."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest

from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.cost.hardware import Layout
from headrace.core.cost.model import StepShape
from headrace.core.workload.traces import TraceRequest
from headrace.plan.presets import ModelRow
from headrace.plan.steps import decode_shape, prefill_shape
from headrace.sim.capacity import Crew
from headrace.sim.claims import (
    BLOOM,
    GPU,
    OPT_13B,
    OPT_66B,
    Effort,
    batching,
    cost_of,
    device,
    short_outputs,
    span_s,
)
from headrace.sim.claims_apart import TASKS, clusters_of, distserve, fitting, rate_per_gpu
from headrace.sim.claims_splitwise import (
    CONVERSATIONS,
    Alone,
    SplitwiseSteps,
    slowdowns_hold,
    splitwise,
)
from headrace.sim.claims_traces import block_hits, hits, mooncake, routing
from headrace.sim.progress import Seen
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


@pytest.mark.parametrize(("row", "billions"), [(OPT_13B, 12.85), (OPT_66B, 65.72), (BLOOM, 176.25)])
def test_shapes_have_the_parameters_that_are_published(row: ModelRow, billions: float) -> None:
    """12 · layers · hidden², and the table."""
    shape = row.build()
    layers = 12 * shape.num_layers * shape.hidden**2
    assert (layers + row.vocab * shape.hidden) / 1e9 == pytest.approx(billions, rel=0.01)


def test_who_is_alone_is_not_slowed_down() -> None:
    cost = cost_of("meta-llama/Llama-2-70b", "A100 SXM 80GB", Layout(tp=8))
    first_ns = cost.step_ns(prefill_shape(1, 100))
    record = record_of(
        SeqId(0), num_prompt_tokens=100, ttft_ns=Ns(2 * first_ns), e2e_ns=Ns(3 * first_ns)
    )
    assert dict(Alone(cost).slowdowns(record)) == pytest.approx({"ttft": 2.0, "e2e": 3.0})


def test_steps_of_the_published_simulator_lie_between_its_measurements() -> None:
    """Whatever a step decodes, it takes what prompts of few tokens left to decode."""
    cost = SplitwiseSteps()
    assert cost.step_ns(decode_shape(64, 600)) == pytest.approx(47.55e6, rel=1e-3)
    assert cost.step_ns(prefill_shape(1, 1536)) == pytest.approx(411.25e6, rel=1e-3)
    mixed = StepShape(1536, 2, 2, 1, 1)
    assert cost.step_ns(mixed) == pytest.approx(1.1 * 411.25e6, rel=1e-3)


def test_a_prompt_leaves_its_answer_room() -> None:
    params = SamplingParams(max_tokens=100)
    spec = SeqSpec(seq_id=SeqId(0), request_id="", prompt_tokens=tuple(range(3000)), params=params)
    found = fitting(spec, 2048)
    assert (len(found.prompt_tokens), found.params.max_tokens) == (1948, 100)


def test_a_batch_lasts_as_long_as_its_longest_answer() -> None:
    crew = Crew(device=device(OPT_13B, "A100 SXM 80GB"), num_workers=1, max_seqs=2)
    one_s, two_s = span_s(crew, [20], 64), span_s(crew, [20, 2], 64)
    assert one_s < two_s < 1.5 * one_s
    # The short ones follow each other beside the long one.
    together_s = span_s(crew, [20, 2, 2, 2], 64)
    assert together_s < two_s + span_s(crew, [2, 2], 64)


def test_longer_answers_than_may_be_are_drawn_again() -> None:
    outputs = short_outputs(Random(1), 32, 400)
    assert len(outputs) == 400
    assert max(outputs) <= 32
    # An exponential that is cut far below its mean is nearly even, not full of its longest.
    assert outputs.count(32) < 40


def test_a_placement_has_as_many_devices_either_way() -> None:
    for task in TASKS:
        clusters = clusters_of(task)
        sizes = {
            name: sum(crew.num_workers * crew.num_gpus for crew in crews)
            for name, crews in clusters.items()
            if name != "together"
        }
        assert set(sizes.values()) == {task.num_gpus}


def test_stages_of_a_decode_instance_share_its_memory_out() -> None:
    one, two = (device(OPT_66B, "A100 SXM 80GB", 4, pp=pp) for pp in (1, 2))
    whole = device(OPT_66B, "A100 SXM 80GB", 8)
    assert one.num_blocks < two.num_blocks < whole.num_blocks


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_continuous_batching_gains_most_where_answers_differ_most() -> None:
    claims = [claim.ours for claim in batching(Effort(num_requests=600))]
    assert claims == sorted(claims)
    assert 1.0 < claims[0] < 2.5
    assert 4.0 < claims[-1] < 12.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_instance_serves_less_where_prompts_are_long_against_their_limit() -> None:
    chat, code, summaries = distserve(Effort(num_requests=100))
    assert chat.ours > 1.4
    assert 0.5 < code.ours < 1.5
    assert summaries.ours > 1.3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_knowing_the_caches_halves_the_wait_of_sessions() -> None:
    [sessions] = routing(Effort(num_requests=300))
    assert sessions.ours > 1.5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_same_machines_serve_about_as_much_apart() -> None:
    """Of fewer requests the 99th percentile is the slowest one, and no queue has time to grow."""
    fitted, published = splitwise(Effort(num_requests=200))
    assert 0.5 < fitted.ours < 3.0
    assert published.ours > 1.0


class Heard:
    """Who watches runs, and how many of their requests have ended."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.expected: dict[str, int] = {}

    @contextmanager
    def watch(self, run: str, num_requests: int) -> Iterator[Seen]:
        self.expected[run] = num_requests
        yield lambda _: self.ended.update([run])


def test_whoever_waits_for_a_claim_hears_of_each_request() -> None:
    heard = Heard()
    effort = Effort(num_requests=20, trace=trace_of((1,), (1, 2), (3,)), watching=heard.watch)
    list(batching(effort))
    list(mooncake(effort))
    assert heard.ended == heard.expected
    assert heard.expected["together"] == 3
    assert heard.expected["continuous, up to 32"] == 20

    heard.ended.clear()
    crew = Crew(device=device(OPT_13B, "A100 SXM 80GB"), num_workers=1)
    rate_per_gpu([crew], TASKS[0].traffic, effort)
    assert heard.ended[f"{TASKS[0].traffic.name}, 1 requests/s"] > 0
    slowdowns_hold([crew], CONVERSATIONS, 7.0, effort=effort, alone=Alone(cost_of(OPT_13B, GPU)))
    assert heard.ended["7 requests/s"] == 20


def test_twenty_machines_are_enough_for_a_few_requests() -> None:
    [claim] = mooncake(Effort(trace=trace_of((1,), (1, 2), (3,))))
    assert claim.ours == 1.0
    assert "together 100.0%" in claim.setting
