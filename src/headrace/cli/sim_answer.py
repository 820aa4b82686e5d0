"""What `headrace sim` says in words: tables of a run."""

from collections.abc import Mapping
from typing import Final

import msgspec
from rich.table import Table

from headrace.cli.plan_answer import right_aligned
from headrace.cli.sim_load import load_words
from headrace.core.autoscaler.events import Drain, Scale, SwitchRole
from headrace.core.base.request import Slo
from headrace.core.base.types import NS_PER_S
from headrace.core.workload.profiles import WorkloadProfile, importance_words
from headrace.sim.scaling import ScalingReport
from headrace.sim.summary import Quantiles, Summary

ROW: Final = ("second", "decision", "pool", "workers", "why")


def asked_words(summary: Summary, load: float | None, profile: WorkloadProfile) -> dict[str, str]:
    return {
        "load": load_words(summary, load, profile),
        "what counts": importance_words(profile),
    }


def tables(found: Summary, slo: Slo, asked: Mapping[str, str]) -> list[Table]:
    """`asked` is what comes first, by its names."""
    stated = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms, "ITL": slo.itl_ms, "E2E": slo.e2e_ms}
    words = [f"{name} {ms:g} ms" for name, ms in stated.items() if ms is not None]
    head = right_aligned(
        f"{found.num_requests} requests, limits: {', '.join(words) or 'none'}", "", ""
    )
    for name, value in (
        *asked.items(),
        ("goodput", f"{found.goodput_per_s:.2f} requests/s"),
        (
            "attainment",
            f"{found.attainment:.1%} ({found.attainment_low:.1%} to {found.attainment_high:.1%})",
        ),
        ("refused", str(found.num_rejected)),
        ("output", f"{found.output_tokens_per_s:,.0f} tokens/s"),
        ("prompt tokens found in caches", f"{found.hit_rate:.1%}"),
        ("handed over, migrated", f"{found.num_handoffs}, {found.num_migrations}"),
        ("trace", found.trace_hash[:16]),
    ):
        head.add_row(name, value)
    misses = [miss_table(found)] if found.num_misses_by_metric_and_cause else []
    return [head, latency_table(found), *misses, role_table(found)]


def latency_table(found: Summary) -> Table:
    table = right_aligned("latencies, ms", "", "mean", "p50", "p90", "p99")
    rows: dict[str, Quantiles] = {
        "TTFT": found.ttft_ms,
        "TPOT": found.tpot_ms,
        "longest ITL": found.worst_itl_ms,
        "E2E": found.e2e_ms,
    }
    for name, row in rows.items():
        values = msgspec.structs.astuple(row)
        table.add_row(name, *("" if value is None else f"{value:,.1f}" for value in values))
    return table


def miss_table(found: Summary) -> Table:
    table = right_aligned("why limits were missed", "limit", "cause", "requests", num_left=2)
    for metric, causes in found.num_misses_by_metric_and_cause.items():
        for cause, count in causes.items():
            table.add_row(metric.upper(), cause.replace("_", " "), str(count))
    return table


def role_table(found: Summary) -> Table:
    columns = ("workers", "busy", "steps/s", "tokens/step", "preempted")
    table = right_aligned("workers", "role", *columns)
    for use in found.roles:
        table.add_row(
            use.role,
            str(use.num_workers),
            f"{use.utilisation:.1%}",
            f"{use.steps_per_s:.1f}",
            f"{use.tokens_per_step:.1f}",
            str(use.num_preemptions),
        )
    return table


def scaling_table(found: ScalingReport) -> Table:
    """What the autoscaler decided, and why."""
    counts = f"{len(found.switches)} changes of roles, {found.most_workers} workers at most"
    table = right_aligned(f"autoscaler: {counts}", *ROW, num_left=3)
    for row in scaling_rows(found):
        table.add_row(f"{row['second']:.0f}", *(str(row[name]) for name in ROW[1:]))
    return table


def scaling_rows(found: ScalingReport) -> list[dict[str, float | str]]:
    rows: list[tuple[float | str, ...]] = []
    for now, effect in found.effects:
        second = now / NS_PER_S
        match effect:
            case Scale(role, num_replicas, reason):
                rows.append((second, "scale", role.value, num_replicas, reason.loop.value))
            case Drain(role, replica_id, reason):
                name = found.name_by_id[replica_id]
                rows.append((second, "drain", role.value, name, reason.loop.value))
            case SwitchRole(replica_id, from_role, to_role, reason):
                pools = f"{from_role.value} to {to_role.value}"
                name = found.name_by_id[replica_id]
                rows.append((second, "switch", pools, name, reason.loop.value))
    return [dict(zip(ROW, row, strict=True)) for row in rows]
