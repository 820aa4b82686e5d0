"""The constants of a public teaching page on LLM serving, whose calculators ours reproduce.

The page prices KV at 160,000 bytes for a token: 80 layers of 8 KV heads of 128, at one byte,
rounded from 160 KiB; the weights are in two bytes. Attention's arithmetic is left out, and 70e9
parameters stand for everything that a token passes through.
"""

from typing import Final

from headrace.core.base.request import Slo
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Accelerator, ModelShape
from headrace.core.workload.profiles import WorkloadProfile

REFERENCE_70B_H100: Final = DataSheetCostModel(
    model=ModelShape(
        name="reference 70B",
        num_layers=80,
        hidden=8192,
        num_heads=64,
        num_params=70e9,
        kv_elems_per_token=160_000.0,
        kv_ways=8,
        source="the rounded constants of the teaching page",
    ),
    accelerator=Accelerator(
        name="H100",
        flop_per_s_by_dtype={"bf16": 989e12},
        memory_bytes=80e9,
        memory_bytes_per_s=3.35e12,
        scaleup_bytes_per_s=450e9,
        scaleout_bytes_per_s=50e9,
        source="the rounded constants of the teaching page",
    ),
    weight_dtype="bf16",
    kv_dtype="fp8",
)

REFERENCE_BATCH: Final = WorkloadProfile(
    name="reference batch",
    purpose="the batch of eight whose roofline the page draws",
    prompt_tokens=2048,
    output_tokens=512,
    source="the teaching page",
)
REFERENCE_TRAFFIC: Final = WorkloadProfile(
    name="reference traffic",
    purpose="what the page's twelve devices serve at nine requests per second",
    prompt_tokens=3072,
    output_tokens=256,
    slo=Slo(ttft_ms=1000.0, tpot_ms=80.0),
    source="the teaching page",
)
REFERENCE_LOAD_PER_S: Final = 9.0
