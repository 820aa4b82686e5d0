"""What a worker that somebody wrote down can be: beyond, a simulation of it would fail, go on for
ever, or out of memory.

Decides what is refused of files; refuses to know which kind of file it was.
"""

import sys
from dataclasses import fields, is_dataclass
from math import inf
from typing import Any, Final

import msgspec

from headrace.core.base.plan import WorkerSpec
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.fitted import FittedCostModel, Link
from headrace.core.cost.model import StepShape

MAX_TOKENS: Final = 1 << 24  # of a sequence, and of a block
MAX_WORKERS: Final = 1 << 12
MAX_BLOCKS: Final = 1 << 22  # of a worker: each takes room here, too
MAX_STEP_NS: Final = 3600e9  # and of a copy


def outside(name: str, value: float, low: float, high: float) -> str:
    """The fault in words; empty = none, as below."""
    return "" if low <= value <= high else f"{name} is {value:.12g}"


def fault_of_worker(spec: WorkerSpec, config: WorkerConfig, cost: FittedCostModel) -> str:
    return (
        outside("block_size", spec.block_size, 1, MAX_TOKENS)
        or outside("num_blocks", spec.num_blocks, 1, MAX_BLOCKS)
        or outside("max_model_len", spec.max_model_len, 1, MAX_TOKENS)
        or fault_of_cost(cost)
        or fault_of_settings(config)
    )


def fault_of_cost(cost: FittedCostModel) -> str:
    for name, number in msgspec.structs.asdict(cost.times).items():
        if fault := outside(name, number, 0, sys.maxsize):
            return fault
    part_ns = (cost.knot_ns[-1], cost.seq_ns, cost.logit_row_ns, cost.attention_pair_ns)
    return outside("ns of a step", max(*part_ns, cost.kv_token_ns), 0, MAX_STEP_NS) or next(
        (fault for link in cost.links.values() if (fault := fault_of_link(link))), ""
    )


def fault_of_link(link: Link) -> str:
    return outside("latency_ns", link.latency_ns, 0, MAX_STEP_NS) or outside(
        "byte_ns", link.byte_ns, 0, MAX_STEP_NS
    )


def fault_of_shape(shape: StepShape) -> str:
    """Of a step that has been."""
    for name, number in msgspec.structs.asdict(shape).items():
        is_least = name in ("num_tokens", "num_seqs")
        if fault := outside(name, number, int(is_least), sys.maxsize):
            return fault
    return ""


def fault_of_settings(config: Any) -> str:
    """Of a dataclass of the schema, against the limits and choices that its fields have."""
    for one in fields(config):
        value, choices = getattr(config, one.name), one.metadata.get("choices")
        fault = ""
        if is_dataclass(value):
            fault = fault_of_settings(value)
        elif isinstance(value, int | float):
            low, high = one.metadata.get("low"), one.metadata.get("high")
            fault = outside(
                one.name, value, -inf if low is None else low, inf if high is None else high
            )
        elif choices and value not in choices:
            fault = f"{one.name} is {value!r}"
        if fault:
            return fault
    return ""
