"""`headrace plan routing`."""

from collections.abc import Sequence

import msgspec
from rich.table import Table

from headrace.cli.plan_answer import check_plot, give, right_aligned
from headrace.cli.plan_flags import AnswerFlags
from headrace.cli.plan_fleet_flags import CountedFlags, TrafficFlags
from headrace.cli.plan_target import check_range
from headrace.cli.sim import read_trace
from headrace.core.base.errors import ConfigError
from headrace.core.workload.traces import TraceRequest
from headrace.plan.engines import Provenance
from headrace.plan.picture import Chart, Line
from headrace.plan.presets import find
from headrace.plan.routing import (
    REFERENCE_RATIO,
    Policy,
    PolicyRun,
    RoutingSetup,
    cumulative_cached_tokens,
    reference_stream,
    run_policy,
)

MAX_WORKERS = 1024
USUAL_WORKERS = 4
MAX_REQUESTS_SHOWN = 64  # whose way is worth a table
CURVE_POINTS = 200


def routing(
    preset: str | None,
    num_workers: int | None,
    counted: CountedFlags | None,
    traffic: TrafficFlags | None,
    simulated: object | None,
    answer: AnswerFlags,
) -> int:
    """`traffic` may name a trace, and nothing else; `simulated` must be None."""
    check_plot(answer)
    trace = counted_trace(traffic, simulated)
    counted = counted or CountedFlags()
    num_workers = USUAL_WORKERS if num_workers is None else num_workers
    setup, ratio = setup_of(num_workers, counted), counted.ratio
    if preset is not None:
        find("preset", preset, {"reference-20": None})
        if trace is not None or ratio is not None or setup != RoutingSetup():
            raise ConfigError(
                f"--preset {preset} says everything already", hint="leave out the other flags"
            )
    if trace is not None and ratio is not None:
        raise ConfigError("--ratio is of a made-up stream", hint="leave out --ratio or --trace")
    ratio = REFERENCE_RATIO if ratio is None else check_range("--ratio", ratio, 0.0, 1.0)
    requests = reference_stream(ratio) if trace is None else read_trace(trace)
    runs = [run_policy(policy, requests, setup) for policy in Policy]
    provenance = Provenance(
        kind="counted",
        sources=(
            f"the trace {trace}" if trace is not None else "the made-up stream of a teaching page",
            f"caches without limit, {setup.prefill_tokens_per_s:,.0f} prefill tokens/s as given",
        ),
    )
    figures = {
        "num_requests": len(requests),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "setup": msgspec.to_builtins(setup),
        "policies": msgspec.to_builtins(runs),
        "provenance": msgspec.to_builtins(provenance),
    }
    tables = [policy_table(runs, len(requests))]
    if len(requests) <= MAX_REQUESTS_SHOWN:
        tables.append(assignment_table(runs, requests))
    return give(figures, tables, saved_chart(runs), answer, provenance=provenance)


def counted_trace(traffic: TrafficFlags | None, simulated: object | None) -> str | None:
    """Raises ConfigError for whatever needs a clock."""
    trace = traffic.trace if traffic else None
    if simulated is not None or (traffic is not None and traffic != TrafficFlags(trace=trace)):
        raise ConfigError(
            "these flags are of a simulation", hint="say --simulate, or leave them out"
        )
    return trace


def setup_of(num_workers: int, counted: CountedFlags) -> RoutingSetup:
    setup = RoutingSetup(
        num_workers=num_workers,
        kv_weight=counted.kv_weight,
        hold_s=counted.hold_s,
        prefill_tokens_per_s=counted.prefill_tokens_per_s,
    )
    check_setup(setup)
    return setup


def check_setup(setup: RoutingSetup) -> None:
    check_range("--workers", setup.num_workers, 1, MAX_WORKERS)
    check_range("--kv-weight", setup.kv_weight, 0.0, 1e6)
    check_range("--prefill-tokens-per-s", setup.prefill_tokens_per_s, 1e-3, 1e12)
    if setup.hold_s is not None:
        check_range("--hold-s", setup.hold_s, 0.0, 1e9)


def policy_table(runs: Sequence[PolicyRun], num_requests: int) -> Table:
    columns = ("hits", "tokens avoided", "of all", "prefill saved", "max load", "requests")
    table = right_aligned(f"{num_requests} requests", "policy", *columns)
    for run in runs:
        counts = run.num_requests_by_worker
        is_short = len(counts) <= 8
        table.add_row(
            run.policy.value,
            f"{run.num_hits}/{run.num_shareable}",
            f"{run.cached_tokens:,}",
            f"{run.cached_share:.1%}",
            f"{run.saved_prefill_ms:,.0f} ms",
            str(run.max_load),
            " ".join(map(str, counts)) if is_short else f"{min(counts)} to {max(counts)}",
        )
    return table


def assignment_table(runs: Sequence[PolicyRun], requests: Sequence[TraceRequest]) -> Table:
    """Requests by number; S begins like others, U does not, * found its beginning."""
    num_workers = len(runs[0].num_requests_by_worker)
    names = [f"worker {worker + 1}" for worker in range(num_workers)]
    table = right_aligned("who got what", "policy", *names, num_left=num_workers + 1)
    for run in runs:
        cells: list[list[str]] = [[] for _ in range(num_workers)]
        pairs = zip(requests, run.assignments, strict=True)
        for number, (request, one) in enumerate(pairs, 1):
            kind, star = "S" if request.blocks else "U", "*" if one.cached_tokens else ""
            cells[one.worker].append(f"{kind}{number}{star}")
        table.add_row(run.policy.value, *(" ".join(cell) for cell in cells))
    return table


def saved_chart(runs: Sequence[PolicyRun]) -> Chart:
    return Chart(
        title="prompt tokens that were there already",
        x_label="requests",
        y_label="tokens",
        lines=[
            Line(run.policy.value, list(cumulative_cached_tokens(run, CURVE_POINTS)))
            for run in runs
        ],
    )
