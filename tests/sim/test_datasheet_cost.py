"""The production engine under a data sheet's cost model: what a device that nobody has would do."""

import pytest

from headrace.core.base.events import Arrive
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.plan.engines import Engine
from headrace.plan.presets import package_presets
from headrace.plan.steps import decode_shape, mean_context_tokens, num_seqs_that_fit
from headrace.sim.world import WorkerSetup, World, simulate

PROMPT, OUTPUT, NUM_SEQS = 256, 64, 4


def test_decode_steps_take_what_the_plan_says() -> None:
    presets = package_presets()
    cost = DataSheetCostModel(
        model=presets.model("Qwen3-32B"),
        accelerator=presets.accelerator("H100 SXM"),
        layout=Layout(tp=2),
        efficiency=Engine.named("vllm").efficiency,
    )
    spec = WorkerSpec(
        model_digest="00" * 32,
        kv_dtype="bf16",
        block_size=16,
        num_blocks=num_seqs_that_fit(cost, 16),
        max_model_len=4096,
        vocab_size=1000,
    )
    seqs = tuple(
        SeqSpec(
            seq_id=SeqId(i),
            request_id=f"r{i}",
            prompt_tokens=tuple((i + j) % 1000 for j in range(PROMPT)),
            params=SamplingParams(max_tokens=OUTPUT),
            eos_token_ids=(),
        )
        for i in range(NUM_SEQS)
    )
    setup = WorkerSetup(config=WorkerConfig(), spec=spec, cost=cost, inputs=[(Ns(0), Arrive(seqs))])
    records = simulate(World(workers=(setup,))).workers[0].records
    assert [record.num_output_tokens for record in records] == [OUTPUT] * NUM_SEQS
    planned_ns = cost.step_ns(decode_shape(NUM_SEQS, mean_context_tokens(PROMPT, OUTPUT)))
    # The last to begin decodes with all the others and waits for nobody's prompt.
    assert min(record.tpot_ns or 0.0 for record in records) == pytest.approx(planned_ns, rel=0.01)
