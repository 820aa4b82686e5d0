"""Tables of what was measured.

Decides which figures are shown and how they are rounded; refuses to judge them.
"""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from headrace.bench.baseline import Change
from headrace.bench.front import FrontReport
from headrace.bench.gateway import GatewayReport
from headrace.bench.kernels import Timed
from headrace.bench.limits import Limits
from headrace.bench.loads import LoadReport, Spread
from headrace.bench.precision import Precision
from headrace.bench.router import RouterReport
from headrace.bench.routing import PolicyReport
from headrace.bench.scheduler import StepOverhead
from headrace.bench.sides import Comparison, Side
from headrace.bench.transfer import TransferReport


def right_aligned(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def load_table(loads: list[LoadReport]) -> Table:
    rates = ("wall s", "out tok/s", "prefill tok/s")
    table = right_aligned("loads", "load", *rates, "TTFT ms", "mean", "TPOT ms", "cached")
    for report in loads:
        table.add_row(
            report.load,
            f"{report.wall_s:.2f}",
            f"{report.output_tokens_per_s:.1f}",
            f"{report.prefill_tokens_per_s:.0f}",
            f"{report.ttft_ms.p50:.0f}",
            f"{report.ttft_ms.mean:.0f}",
            f"{report.tpot_ms.p50:.2f}",
            f"{report.num_cached_tokens / report.num_prompt_tokens:.0%}",
        )
    return table


def scheduler_table(overheads: list[StepOverhead]) -> Table:
    table = right_aligned("host time of a step", "running sequences", "p50 µs", "mean µs", "p99 µs")
    for overhead in overheads:
        step = overhead.step_us
        cells = (f"{step.p50:.0f}", f"{step.mean:.0f}", f"{step.p99:.0f}")
        table.add_row(str(overhead.num_running_seqs), *cells)
    return table


def router_table(report: RouterReport) -> Table:
    title = (
        f"routing: {report.num_workers} workers, {report.num_replicas:,} block replicas of "
        f"{report.bytes_per_replica:.0f} bytes, {report.blocks_per_s:,.0f} blocks/s stored"
    )
    table = right_aligned(title, "", "p50 µs", "mean µs", "p99 µs")
    rows = {
        "decision": report.decision_us,
        "decision, on the wall": report.decision_wall_us,
        "of it: the index": report.match_us,
        "a walk through the same map": report.walk_us,
    }
    if report.dynamo is not None:
        peer = report.dynamo
        name = f"Dynamo {peer.version}'s index, {peer.bytes_per_replica:.0f} bytes a replica"
        rows[name] = peer.match_us
    for name, spread in rows.items():
        table.add_row(name, f"{spread.p50:.0f}", f"{spread.mean:.0f}", f"{spread.p99:.0f}")
    return table


def gateway_table(report: GatewayReport) -> Table:
    title = (
        f"a gateway: {report.num_streams} streams, {report.events_per_s:,.0f} events/s, "
        f"{report.cpu_us_per_event:.0f} µs of its processor an event"
    )
    table = right_aligned(title, "ms", "p50", "mean", "p99")
    for name, direct, relay, through in (
        (
            "request",
            report.direct.request_ms,
            report.relay.request_ms,
            report.through.request_ms,
        ),
        ("event", report.direct.event_ms, report.relay.event_ms, report.through.event_ms),
    ):
        rows = {
            "direct": direct,
            "through a relay": relay,
            "through it": through,
            "added by a relay": relay.beyond(direct),
            "added": through.beyond(direct),
        }
        _add_spreads(table, name, rows)
    return table


def front_table(report: FrontReport) -> Table:
    title = (
        f"a front end of {report.num_workers} workers: {report.num_streams} streams, "
        f"{report.events_per_s:,.0f} events/s, {report.cpu_us_per_event:.0f} µs of its processor "
        f"an event ({report.alone_cpu_us_per_event:.0f} in one process)"
    )
    table = right_aligned(title, "ms", "p50", "mean", "p99")
    for name, alone, through in (
        ("request", report.alone.request_ms, report.through.request_ms),
        ("event", report.alone.event_ms, report.through.event_ms),
    ):
        rows = {
            "in one process": alone,
            "through it": through,
            "added": through.beyond(alone),
        }
        _add_spreads(table, name, rows)
    return table


def _add_spreads(table: Table, name: str, rows: Mapping[str, Spread]) -> None:
    for row, spread in rows.items():
        cells = (f"{value:.2f}" for value in (spread.p50, spread.mean, spread.p99))
        table.add_row(f"{name}, {row}", *cells)


def transfer_table(report: TransferReport) -> Table:
    title = f"moving KV: {report.num_blocks} blocks of {report.block_bytes:,} bytes"
    table = right_aligned(title, "way", "GB/s", "at most", "GB/s", "share")
    for one in report.ways:
        rates = f"{one.gb_per_s:.2f}", one.limit, f"{one.limit_gb_per_s:.2f}"
        table.add_row(one.way, *rates, f"{one.share:.0%}")
    return table


def policy_table(reports: Sequence[PolicyReport]) -> Table:
    columns = ("req/s", "hit rate", "TTFT ms", "p99", "TPOT ms", "good", "good/s")
    table = right_aligned("policies, simulated", "traffic", "policy", *columns)
    for one in reports:
        table.add_row(
            one.traffic,
            one.policy,
            f"{one.rate_per_s:g}",
            f"{one.hit_rate:.1%}",
            f"{one.ttft_ms.mean:.0f}",
            f"{one.ttft_ms.p99:.0f}",
            f"{one.tpot_ms.mean:.1f}",
            f"{one.goodput:.1%}",
            f"{one.goodput_per_s:.2f}",
        )
    return table


def precision_table(measured: Sequence[Precision]) -> Table:
    title = f"perplexity over {measured[0].num_tokens} tokens"
    table = right_aligned(title, "activations", "KV", "perplexity", "change %", "± %")
    for one in measured:
        change = (f"{100 * one.change:+.3f}", f"{100 * one.change_error:.3f}")
        table.add_row(one.activations, one.kv_dtype, f"{one.perplexity:.4f}", *change)
    return table


def comparison_table(sides: Sequence[Side], comparisons: Sequence[Comparison]) -> Table:
    """A row for each figure of a load: medians of all servers, then ratios to the first."""
    num_others = len(sides) - 1
    ratios = [f"ratio {i + 2} : 1" for i in range(num_others)]
    columns = [f"{i}: {side.url}\n{side.model}" for i, side in enumerate(sides, 1)]
    table = right_aligned("side by side", "load", "figure", *columns, *ratios)
    last = ""
    for row in comparisons:
        _, *others = zip(row.ratios, row.lowest_ratios, row.highest_ratios, strict=True)
        table.add_row(
            "" if row.load == last else row.load,
            row.figure,
            *("-" if value is None else f"{value:.2f}" for value in row.medians),
            *("-" if None in span else "{:.2f} ({:.2f}-{:.2f})".format(*span) for span in others),
        )
        last = row.load
    return table


def limit_table(limits: Limits) -> Table:
    table = right_aligned("limits of this machine", "what", "at most")
    memory = {
        "reading memory, all threads": limits.read_bytes_per_s,
        "reading memory, one thread": limits.read_by_one_thread_bytes_per_s,
    }
    products = {
        "float32 multiply-add": limits.f32_ops_per_s,
        "4-bit by 8-bit products": limits.int4_ops_per_s,
        "8-bit by 8-bit products": limits.int8_ops_per_s,
        "bf16 products": limits.bf16_ops_per_s,
    }
    for what, rate in memory.items():
        table.add_row(what, f"{rate / 1e9:.1f} GB/s")
    for what, rate in products.items():
        if rate:
            table.add_row(what, f"{rate / 1e9:.0f} GOP/s")
    return table


def kernel_table(title: str, rows: Sequence[Timed]) -> Table:
    columns = ("activations", "runs", "ms", "fastest", "GB/s", "GFLOP/s", "share", "bound by")
    table = right_aligned(title, "what", *columns)
    for row in rows:
        has_work = row.share is not None
        table.add_row(
            row.name,
            row.activations,
            str(row.num_runs),
            f"{row.median_ms:.3g}" if row.median_ms < 1000 else f"{row.median_ms:.0f}",
            f"{row.fastest_ms:.3g}" if row.fastest_ms < 1000 else f"{row.fastest_ms:.0f}",
            f"{row.gbytes_per_s:.1f}" if has_work else "",
            f"{row.gflop_per_s:.0f}" if has_work else "",
            f"{row.share:.0%}" if row.share is not None else "",
            row.bound,
        )
    return table


def change_table(changes: Sequence[Change]) -> Table:
    table = right_aligned("changes", "figure", "baseline", "here", "change", "")
    for row in changes:
        table.add_row(
            row.figure,
            "" if row.before is None else f"{row.before:,.6g}",
            "" if row.after is None else f"{row.after:,.6g}",
            "" if row.change is None else f"{row.change:+.1%}",
            row.verdict,
        )
    return table
