"""The router's policies on requests of which it is known who should get them."""

from headrace.core.base.request import Slo
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.workload.traces import TraceRequest
from headrace.plan.fleet import Kind, Shape
from headrace.plan.presets import presets_with
from headrace.plan.queueing import CHUNKED
from headrace.sim.fleet_trial import Fleet, Traffic
from headrace.sim.routing import compare_policies

PRESETS = presets_with(None)
FLEET = Fleet(
    shape=Shape(
        decode=Kind(
            DataSheetCostModel(
                model=PRESETS.model("Meta-Llama-3.1-8B"),
                accelerator=PRESETS.accelerator("H100 SXM"),
            )
        ),
        mode=CHUNKED,
    ),
    prefill_workers=0,
    decode_workers=2,
    policy="kv",
    step_tokens=2048,
    block_size=64,
)


def test_who_knows_the_caches_finds_what_can_be_found() -> None:
    """Three documents that are asked about in turns: two workers by turns compute each twice."""
    trace = [
        TraceRequest(
            arrival_s=0.3 * i,
            prompt_tokens=1100,
            output_tokens=2,
            blocks=(i % 3 + 1, 100 + i),
            block_tokens=1024,
        )
        for i in range(30)
    ]
    traffic = Traffic.of_trace(trace, Slo(ttft_ms=1000.0))
    said: list[str] = []
    kv, turns = compare_policies(FLEET, traffic, (0,), ("kv", "round_robin"), said.append)
    assert len(said) == 2
    # Of the 27 that are counted all but those of the first round find their document.
    assert kv.hit_rate.mean > 0.9 > turns.hit_rate.mean
    assert kv.ttft_to_best == 1.0 < turns.ttft_to_best
    assert kv.attainment.mean == 1.0
    assert turns.imbalance < kv.imbalance <= 2.0
