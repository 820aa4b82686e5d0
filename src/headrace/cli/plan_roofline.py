"""`headrace plan roofline`."""

from rich.table import Table

from headrace.cli.plan_answer import (
    check_plot,
    gigabytes,
    give,
    right_aligned,
    seconds,
    short,
    tenths,
)
from headrace.cli.plan_flags import AnswerFlags, LayoutFlags, TargetFlags, WorkloadFlags
from headrace.cli.plan_target import (
    MAX_SEQS,
    check_range,
    engine_and_cost,
    profile_of,
    reference_cost,
)
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.plan.engines import Engine
from headrace.plan.picture import Chart, Line, Mark
from headrace.plan.reference import REFERENCE_BATCH
from headrace.plan.roofline import Roofline, compute_roofline

USUAL_BATCH = 8


def roofline(
    preset: str | None,
    batch: int | None,
    target: TargetFlags | None,
    layout: LayoutFlags | None,
    workload: WorkloadFlags | None,
    answer: AnswerFlags,
) -> int:
    check_plot(answer)
    batch = USUAL_BATCH if batch is None else batch
    check_range("--batch", batch, 1, MAX_SEQS)
    if preset is not None:
        engine, cost = Engine(), reference_cost(preset, target, layout)
        profile = profile_of(workload, REFERENCE_BATCH)
    else:
        engine, cost = engine_and_cost(target or TargetFlags(), layout)
        profile = profile_of(workload)
    found = compute_roofline(
        cost,
        prompt_tokens=profile.prompt_tokens,
        output_tokens=profile.output_tokens,
        batch_seqs=batch,
        engine=engine,
    )
    return give(
        found,
        [phase_table(found), result_table(found)],
        roofline_chart(found, cost),
        answer,
        warnings=found.warnings,
        provenance=found.provenance,
    )


def phase_table(found: Roofline) -> Table:
    ridge = f"ridge {found.ridge_flop_per_byte:.0f} FLOP/byte"
    title = f"{found.model} on {found.accelerator}, {found.layout}, {found.engine}: {ridge}"
    columns = ("step", "FLOP", "bytes", "FLOP/byte", "wall", "compute", "memory", "takes")
    table = right_aligned(title, *columns)
    context = f"decode, {found.context_tokens:,.0f}-token KV"
    for name, phase in (
        (f"prefill {found.prompt_tokens:,}", found.prefill),
        (context, found.decode),
    ):
        table.add_row(
            f"{name} × {found.batch_seqs}",
            short(phase.flop),
            short(phase.memory_bytes),
            tenths(phase.intensity_flop_per_byte),
            phase.bound,
            f"{phase.compute_utilisation:.0%}",
            f"{phase.memory_utilisation:.0%}",
            seconds(phase.step_s),
        )
    return table


def result_table(found: Roofline) -> Table:
    table = right_aligned("one batch", "TTFT", "TPOT", "E2E", "weights", "KV", "of memory")
    table.add_row(
        seconds(found.ttft_s),
        seconds(found.tpot_s),
        seconds(found.e2e_s),
        gigabytes(found.weight_bytes_per_gpu),
        gigabytes(found.kv_bytes_per_gpu),
        gigabytes(found.memory_bytes_per_gpu),
    )
    return table


def roofline_chart(found: Roofline, cost: DataSheetCostModel) -> Chart:
    flop_per_s = cost.accelerator.flop_per_s(cost.weight_dtype)
    ridge = found.ridge_flop_per_byte
    ends = (min(1.0, found.decode.intensity_flop_per_byte / 2), ridge, 100 * ridge)
    roof = [(x, min(flop_per_s, x * cost.accelerator.memory_bytes_per_s)) for x in ends]
    phases = {"prefill": found.prefill, "decode": found.decode}
    return Chart(
        title=f"{found.model} on {found.accelerator}, batch {found.batch_seqs}",
        x_label="intensity, FLOP/byte",
        y_label="FLOP/s of one device",
        lines=[Line(f"roof (ridge {ridge:.0f})", roof)],
        marks=[
            Mark(
                f"{name}, {phase.bound}", (phase.intensity_flop_per_byte, phase.flop / phase.step_s)
            )
            for name, phase in phases.items()
        ],
        is_log_x=True,
        is_log_y=True,
    )
