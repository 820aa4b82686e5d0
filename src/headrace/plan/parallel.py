"""Which layouts of a model fit on so many devices, and what each of them does.

Rules of thumb are stated as rules and held against the numbers of the very layouts.
"""

from collections.abc import Iterator, Sequence

import msgspec

from headrace.core.base.types import NS_PER_S
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout, ModelShape
from headrace.core.workload.profiles import WorkloadProfile
from headrace.plan.engines import Engine, Provenance
from headrace.plan.service import find_excess
from headrace.plan.steps import (
    closed_loop,
    decode_shape,
    mean_context_tokens,
    num_seqs_that_fit,
    prefill_shape,
)

SECONDS_PER_HOUR = 3600
# Of a figure that decides between two layouts; below it they count as equal.
TIE = 0.01


class LayoutFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One layout at the concurrency that was asked about."""

    layout: Layout
    name: str
    weight_bytes_per_gpu: float
    max_seqs_per_replica: int  # whose KV fits, at full length
    ttft_s: float  # of a prompt alone
    tpot_s: float
    output_tokens_per_s: float  # all devices together
    output_tokens_per_s_per_gpu: float
    link_share: float  # of a decode step: collectives and hand-over
    link_bytes_per_step_per_gpu: float
    usd_per_million_output_tokens: float | None
    meets_limits: bool


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of thumb and what the layouts say to it."""

    rule: str
    is_confirmed: bool
    numbers: str


class ParallelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    accelerator: str
    engine: str
    num_gpus: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    layouts: tuple[LayoutFigures, ...]  # most output tokens first
    num_layouts_too_small: int  # that leave no room for one sequence
    rules: tuple[Rule, ...]
    provenance: Provenance


def compute_parallel(
    cost: DataSheetCostModel,
    profile: WorkloadProfile,
    *,
    num_gpus: int,
    concurrency: int,
    engine: Engine,
) -> ParallelAnswer:
    """`cost.layout` is not looked at. Without a layout that fits, `layouts` is empty."""
    layouts = every_layout(cost.model, num_gpus)
    candidates = [msgspec.structs.replace(cost, layout=layout) for layout in layouts]
    candidates = [one for one in candidates if one.has_links()]
    length = profile.prompt_tokens + profile.output_tokens
    fitting = [one for one in candidates if num_seqs_that_fit(one, length) >= 1]
    figures = [layout_figures(one, profile, concurrency, engine) for one in fitting]
    figures.sort(key=lambda one: -one.output_tokens_per_s)
    widest = max(fitting, key=lambda one: one.layout.tp, default=cost)
    context = mean_context_tokens(profile.prompt_tokens, profile.output_tokens)
    return ParallelAnswer(
        model=cost.model.name,
        accelerator=cost.accelerator.name,
        engine=engine.name,
        num_gpus=num_gpus,
        concurrency=concurrency,
        prompt_tokens=profile.prompt_tokens,
        output_tokens=profile.output_tokens,
        layouts=tuple(figures),
        num_layouts_too_small=len(candidates) - len(fitting),
        rules=tuple(check_rules(figures, cost.accelerator.scaleup_gpus)),
        provenance=engine.provenance(widest, concurrency=concurrency, context_tokens=context),
    )


def every_layout(model: ModelShape, num_gpus: int) -> Iterator[Layout]:
    """All that use every device and that the model can be laid out in."""
    for tp in divisors(num_gpus):
        for pp in divisors(num_gpus // tp):
            dp = num_gpus // tp // pp
            for ep in sorted({1, tp * dp}):
                layout = Layout(tp=tp, pp=pp, dp=dp, ep=ep)
                if not model.layout_fault(layout):
                    yield layout


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def layout_figures(
    cost: DataSheetCostModel, profile: WorkloadProfile, concurrency: int, engine: Engine
) -> LayoutFigures:
    """Clients are spread evenly over replicas, and over the batches under way in their stages."""
    layout, prompt, output = cost.layout, profile.prompt_tokens, profile.output_tokens
    batches = layout.dp * layout.pp
    loop = closed_loop(
        cost,
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=max(1.0, concurrency / batches),
        interference_share=engine.interference_share,
    )
    shape = decode_shape(max(1, round(loop.num_seqs)), mean_context_tokens(prompt, output))
    times = cost.times(shape)
    ttft_s = cost.times(prefill_shape(1, prompt)).total_ns / NS_PER_S
    tpot_s = loop.tpot_ns / NS_PER_S
    # Fewer clients than batches leave the others empty.
    rate = loop.output_tokens_per_s * min(batches, concurrency)
    price = cost.accelerator.price_usd_per_hour
    usd_per_token = price * layout.num_gpus / SECONDS_PER_HOUR / rate if price else None
    return LayoutFigures(
        layout=layout,
        name=str(layout),
        weight_bytes_per_gpu=cost.weight_bytes_per_gpu(),
        max_seqs_per_replica=num_seqs_that_fit(cost, prompt + output),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        output_tokens_per_s=rate,
        output_tokens_per_s_per_gpu=rate / layout.num_gpus,
        link_share=times.link_ns / times.total_ns,
        link_bytes_per_step_per_gpu=cost.work(shape).link_bytes,
        usd_per_million_output_tokens=usd_per_token * 1e6 if usd_per_token else None,
        meets_limits=not find_excess(profile.slo, ttft_s, tpot_s, output),
    )


def check_rules(figures: Sequence[LayoutFigures], domain: int) -> Iterator[Rule]:
    """Each rule is about two groups of layouts; without one of them there is nothing to say."""
    smallest = min(map(replica_gpus, figures), default=0)
    yield from compare(
        "the smallest replica that fits gives the most tokens",
        [one for one in figures if replica_gpus(one) == smallest],
        [one for one in figures if replica_gpus(one) > smallest],
        is_rate=True,
    )
    widest = max((one.layout.tp for one in figures), default=0)
    yield from compare(
        "the most tensor parallel ranks give the lowest TPOT",
        [one for one in figures if one.layout.tp == widest],
        [one for one in figures if one.layout.tp < widest],
        is_rate=False,
    )
    yield from compare(
        "tensor parallelism stays within the domain of fast links",
        [one for one in figures if one.layout.tp <= domain],
        [one for one in figures if one.layout.tp > domain],
        is_rate=False,
    )
    yield from compare(
        "whole experts on ranks give more tokens than sliced ones",
        [one for one in figures if one.layout.ep > 1],
        [one for one in figures if one.layout.ep == 1],
        is_rate=True,
    )


def replica_gpus(one: LayoutFigures) -> int:
    """Devices that serve nobody without one another."""
    layout = one.layout
    return layout.num_gpus if layout.ep > 1 else layout.tp * layout.pp


def compare(
    rule: str, ours: Sequence[LayoutFigures], others: Sequence[LayoutFigures], *, is_rate: bool
) -> Iterator[Rule]:
    """Best against best; confirmed where the rule's side is not worse by more than a tie."""
    if not ours or not others:
        return

    def value(one: LayoutFigures) -> float:
        return one.output_tokens_per_s if is_rate else -one.tpot_s

    best, rival = max(ours, key=value), max(others, key=value)
    is_confirmed = value(best) >= value(rival) - TIE * abs(value(rival))
    if is_rate:
        words = [f"{one.name} {one.output_tokens_per_s:,.0f} tokens/s" for one in (best, rival)]
    else:
        words = [f"{one.name} {one.tpot_s * 1000:.1f} ms" for one in (best, rival)]
    yield Rule(rule=rule, is_confirmed=is_confirmed, numbers=" against ".join(words))
