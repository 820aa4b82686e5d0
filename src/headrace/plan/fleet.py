"""What no fleet can do without: the fewest workers that could serve a load, and why some never can.

Bounds from the cost model and means alone, each in favour of the fleet: all that may be shared is
found in a cache, no request waits, every decode step is as full as memory and limits allow. What
they refuse needs no simulation; what they allow, only a simulation can judge.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import permutations
from math import ceil
from typing import Final, NamedTuple, Protocol

import msgspec

from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S
from headrace.core.cost.datasheet import DataSheetCostModel, StepTimes
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


class Fault(NamedTuple):
    """Why a kind of workers cannot serve."""

    constraint: str
    reason: str


class WorkerKind(Protocol):
    """What one worker is; its name is `str` of it."""

    @property
    def accelerator(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def num_gpus(self) -> int: ...
    @property
    def num_engines(self) -> int:
        """That a router chooses among."""
        ...

    @property
    def parallelism(self) -> float:
        """Engines' worth of work that it does at most."""
        ...

    @property
    def usd_per_hour(self) -> float: ...
    @property
    def link_bytes_per_s(self) -> float:
        """For KV, to other workers, of all engines together."""
        ...

    def times(self, shape: StepShape) -> StepTimes:
        """Of one engine's step, alone."""
        ...

    def seqs_that_fit(self, tokens_per_seq: float) -> int:
        """Of one engine."""
        ...

    def fault(self, demand: Demand, mode: str) -> Fault | None:
        """Before anything else is asked of it."""
        ...


class Kind(msgspec.Struct, frozen=True):
    """A worker of a data sheet: a model on devices.

    Its engines are what a router chooses among. Each of as many batches as there are pipeline
    stages has one of its own, with an equal part of the memory; so has each replica of attention
    of ranks that share whole experts.
    """

    cost: DataSheetCostModel  # of one engine's steps

    @property
    def accelerator(self) -> str:
        return self.cost.accelerator.name

    @property
    def layout(self) -> Layout:
        return self.cost.layout

    @property
    def num_gpus(self) -> int:
        return self.cost.layout.num_gpus

    @property
    def num_engines(self) -> int:
        return self.cost.layout.pp * self.cost.layout.dp

    @property
    def parallelism(self) -> float:
        return self.num_engines

    @property
    def usd_per_hour(self) -> float:
        """Only of those that were not refused for having no price."""
        return (self.cost.accelerator.price_usd_per_hour or 0.0) * self.num_gpus

    @property
    def link_bytes_per_s(self) -> float:
        """Every device sends its part over its own link to other machines."""
        accelerator = self.cost.accelerator
        rate = accelerator.scaleout_bytes_per_s or accelerator.scaleup_bytes_per_s
        return rate * self.num_gpus

    def times(self, shape: StepShape) -> StepTimes:
        return self.cost.times(shape)

    def seqs_that_fit(self, tokens_per_seq: float) -> int:
        return num_seqs_that_fit(self.cost, tokens_per_seq) // self.cost.layout.pp

    def fault(self, demand: Demand, mode: str) -> Fault | None:
        cost = self.cost
        if fault := cost.model.layout_fault(cost.layout):
            return Fault("layout", fault)
        if self.num_gpus > 1 and not cost.has_links():
            return Fault(Constraint.LINK, f"no link joins {cost.layout} ranks")
        if not cost.accelerator.price_usd_per_hour:
            return Fault(
                "price",
                "no price: give price_usd_per_hour in a file for --presets, or --price",
            )
        longest = demand.prompt_tokens + demand.output_tokens
        if self.seqs_that_fit(longest) < 1:
            room, weights = kv_room_bytes(cost) / 1e9, cost.weight_bytes_per_gpu() / 1e9
            return Fault(
                Constraint.MEMORY,
                f"weights take {weights:.1f} of {cost.accelerator.memory_bytes / 1e9:.0f} GB a "
                f"device and leave {max(0.0, room):.1f}: no request of {longest:,.0f} tokens fits",
            )
        return None

    def __str__(self) -> str:
        layout = self.cost.layout
        sizes = {"TP": layout.tp, "PP": layout.pp, "EP": layout.ep}
        words = (f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "TP")
        return f"{self.cost.accelerator.name} {' '.join(words)}"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of which kind serve how; how many is open."""

    decode: WorkerKind  # those that decode, whatever else they do
    mode: str
    other: WorkerKind | None = None  # that prompts have, where they are apart; None = the same

    @property
    def prefill(self) -> WorkerKind:
        return self.other or self.decode

    @property
    def is_pair(self) -> bool:
        """Of workers that are not alike."""
        return self.other is not None

    def num_gpus(self, prefill_workers: int, decode_workers: int) -> int:
        return prefill_workers * self.prefill.num_gpus + decode_workers * self.decode.num_gpus

    def usd_per_hour(self, prefill_workers: int, decode_workers: int) -> float:
        prompts = prefill_workers * self.prefill.usd_per_hour
        return prompts + decode_workers * self.decode.usd_per_hour

    def __str__(self) -> str:
        kinds = f"{self.other} : {self.decode}" if self.other else str(self.decode)
        return f"{kinds}, {self.mode}"


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
    prefill_needed: float = 0.0  # of them
    constraint: Constraint  # that sets them
    decode_seqs: int  # that can decode together in one engine

    @property
    def num_workers(self) -> int:
        return self.prefill_workers + self.decode_workers

    @property
    def num_gpus(self) -> int:
        return self.shape.num_gpus(self.prefill_workers, self.decode_workers)

    @property
    def usd_per_hour(self) -> float:
        return self.shape.usd_per_hour(self.prefill_workers, self.decode_workers)

    @property
    def usd_needed(self) -> float:
        """An hour, if workers came in parts."""
        if not self.prefill_workers:
            return self.workers_needed * self.shape.decode.usd_per_hour
        return (
            self.prefill_needed * self.shape.prefill.usd_per_hour
            + (self.workers_needed - self.prefill_needed) * self.shape.decode.usd_per_hour
        )


def every_layout(
    widths: Sequence[int], stages: Sequence[int], expert_ranks: Sequence[int]
) -> Iterator[Layout]:
    """Of one worker; ranks that share whole experts are as many replicas of attention as their
    number has of tensor parallel ranks.
    """
    for tp in widths:
        for pp in stages:
            for ep in expert_ranks:
                if ep == 1 or ep % tp == 0:
                    yield Layout(tp=tp, pp=pp, ep=ep, dp=1 if ep == 1 else ep // tp)


def every_shape(
    costs: Sequence[DataSheetCostModel], layouts: Sequence[Layout], modes: Sequence[str]
) -> Iterator[Shape]:
    """One for each accelerator, layout and mode, and for each pair of unlike workers."""
    kinds = [
        Kind(msgspec.structs.replace(cost, layout=layout)) for cost in costs for layout in layouts
    ]
    for kind in kinds:
        for mode in modes:
            yield Shape(decode=kind, mode=mode)
    if SPLIT in modes:
        for prefill, decode in permutations(kinds, 2):
            yield Shape(decode=decode, mode=SPLIT, other=prefill)


def bound(shape: Shape, demand: Demand) -> Bound | Refusal:
    if refusal := _impossible(shape, demand) or _too_slow(shape, demand):
        return refusal
    prefill, decode = shape.prefill, shape.decode
    num_seqs, is_full = most_seqs(decode, demand)
    prompt = prefill.times(_prompt(demand))
    step = decode.times(decode_shape(num_seqs, demand.context_tokens))
    steps = demand.output_tokens / num_seqs  # a request's part of them
    prefill_s = (prompt.flop_ns + prompt.link_ns) / NS_PER_S / prefill.parallelism
    decode_s = steps * step.total_ns / NS_PER_S / decode.parallelism
    decoding = Constraint.MEMORY if is_full else Constraint.DECODE_BANDWIDTH
    is_of_prompts = prefill_s * prefill.usd_per_hour > decode_s * decode.usd_per_hour
    constraint = Constraint.PREFILL_COMPUTE if is_of_prompts else decoding
    if shape.mode == SPLIT:
        parts = ceil(demand.load_per_s * prefill_s), ceil(demand.load_per_s * decode_s)
        return Bound(
            shape=shape,
            prefill_workers=max(1, parts[0]),
            decode_workers=max(1, parts[1]),
            workers_needed=demand.load_per_s * (prefill_s + decode_s),
            prefill_needed=demand.load_per_s * prefill_s,
            constraint=constraint,
            decode_seqs=num_seqs,
        )
    # A mixed step reads memory while it computes: the larger of the two, and what comes on top.
    flop_ns = prompt.flop_ns + steps * step.flop_ns
    rest_ns = steps * (step.link_ns + step.overhead_ns)
    both_s = (max(flop_ns, steps * step.memory_ns) + rest_ns) / NS_PER_S / decode.parallelism
    return Bound(
        shape=shape,
        prefill_workers=0,
        decode_workers=max(1, ceil(demand.load_per_s * both_s)),
        workers_needed=demand.load_per_s * both_s,
        constraint=constraint,
        decode_seqs=num_seqs,
    )


def most_seqs(kind: WorkerKind, demand: Demand) -> tuple[int, bool]:
    """Sequences that may decode together in one engine, and whether memory is what keeps them from
    being more.
    """
    room = min(MAX_SEQS, kind.seqs_that_fit(demand.context_tokens))
    limit_s = _token_limit_s(demand)
    if limit_s is None:
        return room, room < MAX_SEQS
    low, high = 1, room
    while low < high:
        middle = (low + high + 1) // 2
        step_ns = kind.times(decode_shape(middle, demand.context_tokens)).total_ns
        low, high = (middle, high) if step_ns <= limit_s * NS_PER_S else (low, middle - 1)
    return low, low == room < MAX_SEQS


def _impossible(shape: Shape, demand: Demand) -> Refusal | None:
    kinds = (shape.other, shape.decode) if shape.other else (shape.decode,)
    faults = (kind.fault(demand, shape.mode) for kind in kinds)
    return next((_refuse(shape, *fault) for fault in faults if fault), None)


def _too_slow(shape: Shape, demand: Demand) -> Refusal | None:
    """Limits that a mean request breaks even alone."""
    slo = demand.slo
    prefill_ms = shape.prefill.times(_prompt(demand)).total_ns / 1e6
    step_ms = shape.decode.times(decode_shape(1, demand.context_tokens)).total_ns / 1e6
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
