"""What no fleet can do without: the fewest workers that could serve a load, and why some never can.

Bounds from the cost model and means alone, each in favour of the fleet: all that may be shared is
found in a cache, no request waits, every decode step is as full as memory and limits allow. What
they refuse needs no simulation; what they allow, only a simulation can judge.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import ceil
from typing import Final

import msgspec

from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.core.cost.model import StepShape
from headrace.plan.queueing import CHUNKED, PREFILL_FIRST, SPLIT
from headrace.plan.steps import decode_shape, kv_room_bytes, mean_context_tokens, num_seqs_that_fit

MAX_SEQS: Final = 256  # that the scheduler puts into a step
MODES: Final = (CHUNKED, PREFILL_FIRST, SPLIT)


class Constraint(StrEnum):
    """What keeps a fleet from being smaller."""

    MEMORY = "memory"
    PREFILL_COMPUTE = "prefill compute"
    DECODE_BANDWIDTH = "decode bandwidth"
    QUEUEING = "queueing"
    LINK = "link"
    NONE = "nothing: fewer workers cannot be"


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """A workload as means. `cached_share` is the most of prompts that caches could hold."""

    load_per_s: float
    prompt_tokens: float
    output_tokens: float
    cached_share: float
    slo: Slo

    @property
    def new_tokens(self) -> int:
        """Of a prompt that caches cannot hold."""
        return max(1, round(self.prompt_tokens * (1.0 - self.cached_share)))

    @property
    def context_tokens(self) -> float:
        return mean_context_tokens(self.prompt_tokens, self.output_tokens)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are alike; how many is open."""

    cost: DataSheetCostModel  # of one worker
    mode: str

    @property
    def gpus_per_worker(self) -> int:
        return self.cost.layout.num_gpus

    @property
    def usd_per_worker_hour(self) -> float:
        """Only of shapes that were not refused for having no price."""
        return (self.cost.accelerator.price_usd_per_hour or 0.0) * self.gpus_per_worker

    def __str__(self) -> str:
        return f"{self.cost.accelerator.name} TP{self.cost.layout.tp}, {self.mode}"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A shape that is not simulated, and why."""

    shape: str
    constraint: str
    reason: str


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The fewest workers that could do: fewer are overloaded, however lucky."""

    shape: Shape
    prefill_workers: int  # 0 = all do both
    decode_workers: int
    workers_needed: float  # the same in parts
    constraint: Constraint  # that sets them
    decode_seqs: int  # that can decode together in one worker

    @property
    def num_workers(self) -> int:
        return self.prefill_workers + self.decode_workers

    @property
    def usd_per_hour(self) -> float:
        return self.num_workers * self.shape.usd_per_worker_hour


def every_shape(
    costs: Sequence[DataSheetCostModel], widths: Sequence[int], modes: Sequence[str]
) -> Iterator[Shape]:
    """One for each accelerator, number of tensor parallel ranks and mode."""
    for cost in costs:
        for tp in widths:
            own = msgspec.structs.replace(cost, layout=Layout(tp=tp))
            for mode in modes:
                yield Shape(cost=own, mode=mode)


def bound(shape: Shape, demand: Demand) -> Bound | Refusal:
    if refusal := _impossible(shape, demand) or _too_slow(shape, demand):
        return refusal
    num_seqs, is_full = most_seqs(shape.cost, demand)
    prompt = shape.cost.times(_prompt(demand))
    step = shape.cost.times(decode_shape(num_seqs, demand.context_tokens))
    steps = demand.output_tokens / num_seqs  # a request's part of them
    prefill_s = (prompt.flop_ns + prompt.link_ns) / NS_PER_S
    decode_s = steps * step.total_ns / NS_PER_S
    decoding = Constraint.MEMORY if is_full else Constraint.DECODE_BANDWIDTH
    constraint = Constraint.PREFILL_COMPUTE if prefill_s > decode_s else decoding
    if shape.mode == SPLIT:
        parts = ceil(demand.load_per_s * prefill_s), ceil(demand.load_per_s * decode_s)
        return Bound(
            shape=shape,
            prefill_workers=max(1, parts[0]),
            decode_workers=max(1, parts[1]),
            workers_needed=demand.load_per_s * (prefill_s + decode_s),
            constraint=constraint,
            decode_seqs=num_seqs,
        )
    # A mixed step reads memory while it computes: the larger of the two, and what comes on top.
    flop_ns = prompt.flop_ns + steps * step.flop_ns
    rest_ns = steps * (step.link_ns + step.overhead_ns)
    both_s = (max(flop_ns, steps * step.memory_ns) + rest_ns) / NS_PER_S
    return Bound(
        shape=shape,
        prefill_workers=0,
        decode_workers=max(1, ceil(demand.load_per_s * both_s)),
        workers_needed=demand.load_per_s * both_s,
        constraint=constraint,
        decode_seqs=num_seqs,
    )


def most_seqs(cost: DataSheetCostModel, demand: Demand) -> tuple[int, bool]:
    """Sequences that may decode together, and whether memory is what keeps them from being more."""
    room = min(MAX_SEQS, num_seqs_that_fit(cost, demand.context_tokens))
    limit_s = _token_limit_s(demand)
    if limit_s is None:
        return room, room < MAX_SEQS
    low, high = 1, room
    while low < high:
        middle = (low + high + 1) // 2
        step_ns = cost.times(decode_shape(middle, demand.context_tokens)).total_ns
        low, high = (middle, high) if step_ns <= limit_s * NS_PER_S else (low, middle - 1)
    return low, low == room < MAX_SEQS


def _impossible(shape: Shape, demand: Demand) -> Refusal | None:
    cost = shape.cost
    if fault := cost.model.layout_fault(cost.layout):
        return _refuse(shape, "layout", fault)
    if shape.gpus_per_worker > 1 and not cost.has_links():
        return _refuse(shape, Constraint.LINK, f"no link joins {cost.layout} ranks")
    if not cost.accelerator.price_usd_per_hour:
        return _refuse(
            shape, "price", "no price: give price_usd_per_hour in a file for --presets, or --price"
        )
    longest = demand.prompt_tokens + demand.output_tokens
    if num_seqs_that_fit(cost, longest) < 1:
        room, weights = kv_room_bytes(cost) / 1e9, cost.weight_bytes_per_gpu() / 1e9
        return _refuse(
            shape,
            Constraint.MEMORY,
            f"weights take {weights:.1f} of {cost.accelerator.memory_bytes / 1e9:.0f} GB a device "
            f"and leave {max(0.0, room):.1f}: no request of {longest:,.0f} tokens fits",
        )
    return None


def _too_slow(shape: Shape, demand: Demand) -> Refusal | None:
    """Limits that a mean request breaks even alone."""
    cost, slo = shape.cost, demand.slo
    prefill_ms = cost.times(_prompt(demand)).total_ns / 1e6
    step_ms = cost.times(decode_shape(1, demand.context_tokens)).total_ns / 1e6
    if slo.ttft_ms is not None and prefill_ms > slo.ttft_ms:
        words = f"a mean prompt alone takes {prefill_ms:,.0f} ms, TTFT may be {slo.ttft_ms:g}"
        return _refuse(shape, Constraint.PREFILL_COMPUTE, words)
    if slo.tpot_ms is not None and step_ms > slo.tpot_ms:
        words = f"a token alone takes {step_ms:.1f} ms, TPOT may be {slo.tpot_ms:g}"
        return _refuse(shape, Constraint.DECODE_BANDWIDTH, words)
    e2e_ms = prefill_ms + (demand.output_tokens - 1) * step_ms
    if slo.e2e_ms is not None and e2e_ms > slo.e2e_ms:
        words = f"a mean request alone takes {e2e_ms:,.0f} ms, E2E may be {slo.e2e_ms:g}"
        return _refuse(shape, Constraint.DECODE_BANDWIDTH, words)
    return None


def _refuse(shape: Shape, constraint: str, reason: str) -> Refusal:
    return Refusal(shape=str(shape), constraint=str(constraint), reason=reason)


def _prompt(demand: Demand) -> StepShape:
    """What of a mean prompt no cache holds, behind what one may."""
    new, length = demand.new_tokens, max(demand.new_tokens, round(demand.prompt_tokens))
    pairs = new * (length - new) + new * (new + 1) // 2
    return StepShape(new, 1, 1, pairs, length)


def _token_limit_s(demand: Demand) -> float | None:
    """The most that a token may take on average."""
    slo = demand.slo
    limits_ms = [slo.tpot_ms] if slo.tpot_ms is not None else []
    if slo.e2e_ms is not None:
        limits_ms.append(slo.e2e_ms / max(1.0, demand.output_tokens - 1))
    return min(limits_ms) / 1000 if limits_ms else None
