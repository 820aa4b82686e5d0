"""`headrace plan routing --simulate`: the policies of the production router."""

from collections.abc import Sequence
from typing import Final

import msgspec
from rich.table import Table

from headrace.cli.output import report_note
from headrace.cli.plan_answer import check_plot, give, right_aligned
from headrace.cli.plan_calibrated import calibrated_provenance, only_kind
from headrace.cli.plan_flags import AnswerFlags
from headrace.cli.plan_fleet import (
    MAX_SEEDS,
    check_policies,
    check_worker,
    costs_of,
    priced,
    spanned,
    step_tokens_of,
    traffic_of,
)
from headrace.cli.plan_fleet_flags import (
    DEFAULT_GPUS,
    POLICIES,
    CountedFlags,
    PolicyFlags,
    TrafficFlags,
    WorkerFlags,
)
from headrace.cli.plan_routing import MAX_WORKERS, USUAL_WORKERS
from headrace.cli.plan_target import check_range
from headrace.cli.sim_progress import showing
from headrace.core.base.errors import ConfigError
from headrace.core.cost.hardware import Layout
from headrace.plan.engines import Engine
from headrace.plan.fleet import Kind, Refusal, Shape, WorkerKind, bound
from headrace.plan.picture import Chart, Mark
from headrace.plan.queueing import CHUNKED
from headrace.sim.fleet_machine import CalibratedKind
from headrace.sim.fleet_trial import Fleet, Traffic
from headrace.sim.routing import PolicyRow, compare_policies

USUAL_SHARE: Final = 0.7  # of what the workers could do at most


def policies(
    num_workers: int | None,
    of_counting: tuple[str | None, CountedFlags | None],
    flags: PolicyFlags,
    traffic_flags: TrafficFlags,
    worker: WorkerFlags,
    answer: AnswerFlags,
) -> int:
    """`of_counting` must be empty: there is nothing here that it would mean."""
    check_plot(answer)
    if of_counting != (None, None):
        raise ConfigError(
            "--simulate takes neither --preset nor what is only counted", hint="leave these out"
        )
    check_range("--seeds", flags.seeds, 1, MAX_SEEDS)
    check_worker(worker)
    check_policies(flags.policy)
    engine = Engine.named(worker.engine)
    kind = kind_of(flags, worker, engine)
    fleet = fleet_of(num_workers, kind, worker)
    traffic = usual_load(traffic_of(traffic_flags), traffic_flags, fleet)
    seeds = range(worker.seed, worker.seed + flags.seeds)
    rows = compare_policies(fleet, traffic, seeds, flags.policy or POLICIES, report_note, showing)
    if isinstance(kind, CalibratedKind):
        provenance = calibrated_provenance([kind], priced=False)
    else:
        context = traffic.demand.context_tokens
        provenance = engine.provenance(kind.cost, concurrency=1, context_tokens=context)
    figures = {
        "num_workers": fleet.num_engines,
        "num_requests_per_run": traffic.num_counted,
        "demand": msgspec.to_builtins(traffic.demand),
        "seeds": list(seeds),
        "policies": msgspec.to_builtins(rows),
        "provenance": msgspec.to_builtins(provenance),
    }
    return give(
        figures,
        [policy_table(rows, fleet, traffic)],
        hit_chart(rows),
        answer,
        provenance=provenance,
    )


def kind_of(flags: PolicyFlags, worker: WorkerFlags, engine: Engine) -> Kind | CalibratedKind:
    """Its price decides nothing, and may be unknown."""
    if flags.cost is not None:
        if flags.gpu is not None or flags.tp is not None:
            raise ConfigError("--cost FILE says what runs already", hint="leave out --gpu and --tp")
        return only_kind(flags.cost, worker)
    tp = 1 if flags.tp is None else flags.tp
    check_range("--tp", tp, 1, 1024)
    [found] = costs_of((flags.gpu or DEFAULT_GPUS[0],), (), worker, engine)
    accelerator = priced(found.accelerator, 1.0)
    return Kind(msgspec.structs.replace(found, accelerator=accelerator, layout=Layout(tp=tp)))


def fleet_of(num_workers: int | None, kind: WorkerKind, worker: WorkerFlags) -> Fleet:
    """Raises ConfigError where a machine would be left with fewer workers than were calibrated."""
    is_calibrated = isinstance(kind, CalibratedKind)
    if num_workers is None:
        num_workers = kind.num_engines if is_calibrated else USUAL_WORKERS
    check_range("--workers", num_workers, 1, MAX_WORKERS)
    if num_workers % kind.num_engines:
        raise ConfigError(
            f"--workers is {num_workers}, and {kind} was calibrated with {kind.num_engines}",
            hint=f"make it a multiple of {kind.num_engines}, so that machines are whole",
        )
    return Fleet(
        shape=Shape(decode=kind, mode=CHUNKED),
        prefill_workers=0,
        decode_workers=num_workers // kind.num_engines,
        policy=POLICIES[0],
        step_tokens=step_tokens_of(worker, is_calibrated=is_calibrated),
        block_size=worker.block_size,
        kv_link_bytes_per_s=(worker.kv_link_gb_s or 0.0) * 1e9,
    )


def usual_load(traffic: Traffic, flags: TrafficFlags, fleet: Fleet) -> Traffic:
    """Without a load, a share of what the workers could do if nobody had to wait.

    Raises ConfigError for workers that can serve no request.
    """
    found = bound(fleet.shape, traffic.demand)
    if isinstance(found, Refusal):
        raise ConfigError(f"{found.shape}: {found.reason}")
    if flags.load is not None or traffic.trace:
        return traffic
    most_per_s = traffic.load_per_s / found.workers_needed * fleet.num_workers
    return msgspec.structs.replace(traffic, load_per_s=USUAL_SHARE * most_per_s)


def policy_table(rows: Sequence[PolicyRow], fleet: Fleet, traffic: Traffic) -> Table:
    demand = traffic.demand
    title = (
        f"{fleet.num_workers} × {fleet.shape}: {demand.load_per_s:.3g} requests/s, "
        f"{traffic.num_counted} counted in a run; caches could hold {demand.cached_share:.1%}"
    )
    columns = (
        "cached",
        "TTFT mean, ms",
        "to best",
        "p99, ms",
        "TPOT p99, ms",
        "good",
        "good/s",
        "imbalance",
    )
    table = right_aligned(title, "policy", *columns)
    for row in rows:
        table.add_row(
            row.policy,
            spanned(row.hit_rate, "{:.1%}"),
            spanned(row.ttft_mean_ms, "{:,.0f}"),
            f"{row.ttft_to_best:.2f}×",
            f"{row.ttft_p99_ms:,.0f}",
            f"{row.tpot_p99_ms:,.1f}",
            spanned(row.attainment, "{:.1%}"),
            f"{row.goodput_per_s:.2f}",
            f"{row.imbalance:.2f}",
        )
    return table


def hit_chart(rows: Sequence[PolicyRow]) -> Chart:
    return Chart(
        title="what routing policies find and what requests wait",
        x_label="prompt tokens found in caches, %",
        y_label="mean TTFT, ms",
        marks=[
            Mark(row.policy, (row.hit_rate.mean * 100.0, row.ttft_mean_ms.mean)) for row in rows
        ],
    )
