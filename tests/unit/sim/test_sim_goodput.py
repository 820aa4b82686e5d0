"""The simulator judges the same three ways to serve as the closed forms."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from headrace.core.base.request import Slo
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.plan.presets import presets_with
from headrace.plan.queueing import CHUNKED, PREFILL_FIRST, SPLIT
from headrace.plan.service import ServiceTimes
from headrace.sim.goodput import Judge, Trial, simulated_verdicts
from headrace.sim.progress import Seen
from headrace.sim.setup import Device, Layout

PRESETS = presets_with(None)
COST = DataSheetCostModel(
    model=PRESETS.model("meta-llama/Meta-Llama-3.1-8B"), accelerator=PRESETS.accelerator("H100 SXM")
)
SERVICE = ServiceTimes(
    cost=COST,
    num_workers=2,
    prompt_tokens=2000,
    output_tokens=12,
    design_batch_seqs=32,
    chunk_tokens=512,
)
JUDGE = Judge(
    service=SERVICE,
    slo=Slo(ttft_ms=80.0, tpot_ms=20.0),
    device=Device.of_data_sheet(COST),
    num_requests=25,
)


def test_each_way_has_a_verdict() -> None:
    verdicts = {one.mode: one for one in simulated_verdicts(JUDGE, 2.0)}
    assert set(verdicts) == {PREFILL_FIRST, CHUNKED, SPLIT}
    for one in verdicts.values():
        assert one.is_good
        assert one.model == "simulator"
        assert one.ttft_s is not None
        assert 0.9 * SERVICE.prefill_s < one.ttft_s < 0.08
        loads = [load for load, _ in one.goodput_per_s_by_load]
        assert 2.0 in loads
        assert loads == sorted(loads)
        assert all(goodput <= load for load, goodput in one.goodput_per_s_by_load)
    assert (verdicts[SPLIT].prefill_workers, verdicts[SPLIT].decode_workers) == (1, 1)
    assert verdicts[CHUNKED].prefill_workers is None


def test_who_watches_hears_of_each_run_and_request() -> None:
    heard: dict[str, list[int]] = {}

    @contextmanager
    def watching(label: str, num_requests: int) -> Iterator[Seen]:
        assert num_requests == JUDGE.num_requests
        yield heard.setdefault(label, []).append

    trial = Trial(mode=CHUNKED, layout=Layout(mixed=2))
    watched = msgspec.structs.replace(JUDGE, watching=watching)
    assert watched.summary(trial, 2.0) == JUDGE.summary(trial, 2.0)
    assert {label: len(ends) for label, ends in heard.items()} == {f"{CHUNKED}, 2/s": 25}


def test_more_load_is_less_good_and_runs_are_alike() -> None:
    trial = Trial(mode=PREFILL_FIRST, layout=Layout(mixed=2, step_tokens=2512, budget="fixed"))
    light, heavy = (JUDGE.summary(trial, load) for load in (2.0, 200.0))
    assert light.attainment == 1.0 > heavy.attainment
    assert JUDGE.summary(trial, 200.0) == heavy
