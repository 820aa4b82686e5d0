"""`headrace plan kv` and `headrace plan parallel`: what fits where."""

from collections.abc import Sequence

import msgspec
from rich.table import Table

from headrace.cli.plan_answer import check_plot, gigabytes, give, right_aligned, seconds
from headrace.cli.plan_flags import AnswerFlags, LayoutFlags, TargetFlags, WorkloadFlags
from headrace.cli.plan_target import (
    MAX_GPUS,
    MAX_SEQS,
    MAX_TOKENS,
    check_range,
    engine_and_cost,
    profile_of,
    reference_cost,
)
from headrace.core.base.errors import ConfigError
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Layout
from headrace.plan.kv import KvAnswer, compute_kv
from headrace.plan.parallel import ParallelAnswer, compute_parallel
from headrace.plan.picture import Chart, Line, Mark

USUAL_LENGTHS = (1024, 4096, 16384, 65536, 131072)
USUAL_TP = (1, 2, 4, 8)
SHOWN_DTYPES = ("bf16", "fp8", "int4")
MAX_LAYOUTS_SHOWN = 20


def kv(
    preset: str | None,
    lengths: Sequence[int],
    target: TargetFlags | None,
    layout: LayoutFlags | None,
    answer: AnswerFlags,
) -> int:
    check_plot(answer)
    lengths = sorted(set(lengths or USUAL_LENGTHS))
    for length in lengths:
        check_range("--length", length, 1, MAX_TOKENS)
    if preset is not None:
        cost = reference_cost(preset, target, layout)
    else:
        _, cost = engine_and_cost(target or TargetFlags(), layout)
    found = compute_kv(cost, [cost.layout] if layout is not None else usual_layouts(cost), lengths)
    return give(
        found,
        [size_table(found), fit_table(found)],
        fit_chart(found),
        answer,
        warnings=found.warnings,
        provenance=found.provenance,
    )


def usual_layouts(cost: DataSheetCostModel) -> list[Layout]:
    """One device, and those of several whose ranks fast links join and the model can lie on."""
    domain = max(1, cost.accelerator.scaleup_gpus)
    layouts = (Layout(tp=tp) for tp in USUAL_TP if tp <= domain)
    return [
        layout
        for layout in layouts
        if not cost.model.layout_fault(layout)
        and msgspec.structs.replace(cost, layout=layout).has_links()
    ]


def size_table(found: KvAnswer) -> Table:
    title = f"{found.model}: {found.attention}, {found.kv_elems_per_token:,.0f} elements a token"
    table = right_aligned(title, "KV of", *SHOWN_DTYPES)
    by_dtype = found.kv_bytes_per_token_by_dtype
    table.add_row("one token", *(f"{by_dtype[dtype]:,.0f} B" for dtype in SHOWN_DTYPES))
    own = by_dtype[found.kv_dtype]
    for length, num_bytes in found.kv_bytes_per_request_by_tokens.items():
        sizes = (num_bytes * by_dtype[dtype] / own for dtype in SHOWN_DTYPES)
        table.add_row(f"{length:,} tokens", *map(gigabytes, sizes))
    return table


def fit_table(found: KvAnswer) -> Table:
    title = f"requests that fit on {found.accelerator}, KV in {found.kv_dtype}"
    lengths = [f"{length:,}" for length in found.kv_bytes_per_request_by_tokens]
    table = right_aligned(title, "replica", "weights", "room", "copies", *lengths)
    for row in found.layouts:
        has_room = row.kv_room_bytes_per_gpu > 0
        table.add_row(
            row.layout,
            f"{row.weight_bytes_per_gpu / 1e9:.1f} GB",
            f"{row.kv_room_bytes_per_gpu / 1e9:.1f} GB" if has_room else "none",
            str(row.num_kv_copies),
            *(f"{num:,}" for num in row.num_seqs_by_tokens.values()),
        )
    return table


def fit_chart(found: KvAnswer) -> Chart:
    return Chart(
        title=f"{found.model} on {found.accelerator}, KV in {found.kv_dtype}",
        x_label="tokens of a request",
        y_label="requests that fit",
        lines=[
            Line(row.layout, [(float(n), float(num)) for n, num in row.num_seqs_by_tokens.items()])
            for row in found.layouts
        ],
        is_log_x=True,
        is_log_y=True,
    )


def parallel(
    num_gpus: int,
    concurrency: int,
    target: TargetFlags | None,
    workload: WorkloadFlags | None,
    answer: AnswerFlags,
) -> int:
    check_plot(answer)
    check_range("--gpus", num_gpus, 1, MAX_GPUS)
    check_range("--concurrency", concurrency, 1, MAX_SEQS)
    engine, cost = engine_and_cost(target or TargetFlags())
    profile = profile_of(workload)
    found = compute_parallel(
        cost, profile, num_gpus=num_gpus, concurrency=concurrency, engine=engine
    )
    if not found.layouts:
        need = cost.weight_bytes_per_gpu() / 1e9
        raise ConfigError(
            f"{found.model} fits no layout of {num_gpus} × {found.accelerator}:"
            f" {need:.0f} GB of weights, and KV of {profile.prompt_tokens + profile.output_tokens}"
            " tokens",
            hint="more --gpus, larger ones, or smaller --weights",
        )
    tables = [layout_table(found), rule_table(found)]
    return give(found, tables, layout_chart(found), answer, provenance=found.provenance)


def layout_table(found: ParallelAnswer) -> Table:
    title = (
        f"{found.model} on {found.num_gpus} × {found.accelerator}, {found.engine}:"
        f" {found.concurrency} requests of {found.prompt_tokens:,} + {found.output_tokens:,} tokens"
    )
    columns = ("weights", "most seqs", "TTFT alone", "TPOT", "links", "tokens/s", "per GPU", "$/M")
    table = right_aligned(title, "layout", *columns, "limits")
    for one in found.layouts[:MAX_LAYOUTS_SHOWN]:
        usd = one.usd_per_million_output_tokens
        table.add_row(
            one.name,
            f"{one.weight_bytes_per_gpu / 1e9:.1f} GB",
            f"{one.max_seqs_per_replica:,}",
            seconds(one.ttft_s),
            seconds(one.tpot_s),
            f"{one.link_share:.0%}",
            f"{one.output_tokens_per_s:,.0f}",
            f"{one.output_tokens_per_s_per_gpu:,.0f}",
            "" if usd is None else f"{usd:.2f}",
            "met" if one.meets_limits else "missed",
        )
    return table


def rule_table(found: ParallelAnswer) -> Table:
    table = right_aligned("rules of thumb", "rule", "here", "numbers", num_left=3)
    for rule in found.rules:
        verdict = "confirmed" if rule.is_confirmed else "contradicted"
        table.add_row(rule.rule, verdict, rule.numbers)
    return table


def layout_chart(found: ParallelAnswer) -> Chart:
    """Tokens for the operator against tokens for the user; the best of each trade have names."""
    shown = found.layouts[:MAX_LAYOUTS_SHOWN]
    rates = [(1 / one.tpot_s, one.output_tokens_per_s_per_gpu) for one in shown]
    is_best = [not any(x > a and y > b for x, y in rates) for a, b in rates]
    return Chart(
        title=f"{found.model} on {found.num_gpus} × {found.accelerator}",
        x_label="tokens/s of one request",
        y_label="tokens/s of one device",
        marks=[
            Mark(one.name if best else "", rate)
            for one, rate, best in zip(shown, rates, is_best, strict=True)
        ],
    )
