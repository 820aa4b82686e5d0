"""`headrace plan fleet`."""

import time
from collections.abc import Sequence
from typing import Final

import msgspec
from rich.table import Table

from headrace.cli.output import report_note
from headrace.cli.plan_answer import check_plot, give, right_aligned
from headrace.cli.plan_calibrated import calibrated_kinds, calibrated_provenance
from headrace.cli.plan_flags import AnswerFlags
from headrace.cli.plan_fleet_flags import (
    DEFAULT_GPUS,
    POLICIES,
    SearchFlags,
    TrafficFlags,
    WorkerFlags,
)
from headrace.cli.plan_target import check_dtype, check_range
from headrace.cli.sim import limits, read_trace
from headrace.cli.sim_progress import showing
from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import Accelerator, Layout, ModelShape
from headrace.core.workload.profiles import CHAT, profile_named
from headrace.plan.engines import Engine, Provenance
from headrace.plan.fleet import Kind, Shape, every_layout, every_shape
from headrace.plan.picture import Chart, Line, Mark
from headrace.plan.presets import Presets, find, presets_with
from headrace.plan.queueing import CHUNKED, PREFILL_FIRST, SPLIT
from headrace.sim.fleet import FleetQuestion, search_fleet
from headrace.sim.fleet_answer import FleetAnswer, FleetRow, WorkerRow
from headrace.sim.fleet_machine import CalibratedKind
from headrace.sim.fleet_trial import Interval, Traffic

USUAL_LOAD_PER_S: Final = 10.0
MIN_REQUESTS: Final = 10  # fewer say nothing
USUAL_REQUESTS: Final = 400
USUAL_STEP_TOKENS: Final = 2048
USUAL_WIDTHS: Final = (1, 2, 4, 8)
MODES: Final = {"chunked": CHUNKED, "prefill-first": PREFILL_FIRST, "disaggregated": SPLIT}
MAX_SEEDS: Final = 30


def fleet(
    traffic_flags: TrafficFlags, search: SearchFlags, worker: WorkerFlags, answer: AnswerFlags
) -> int:
    check_plot(answer)
    traffic = traffic_of(traffic_flags)
    engine, costs = Engine.named(worker.engine), list[DataSheetCostModel]()
    machines = list[CalibratedKind]()
    if search.cost:
        check_machines(search)
        machines = calibrated_kinds(search.cost, search.price, worker)
        shapes = [Shape(decode=kind, mode=mode) for kind in machines for mode in modes_of(search)]
    else:
        costs = costs_of(search.gpu or DEFAULT_GPUS, search.price, worker, engine)
        shapes = shapes_of(search, costs)
    question = question_of(search, worker, traffic, shapes)
    check_range("--time-budget-s", search.time_budget_s, 1.0, 1e6)
    deadline_s = time.monotonic() + search.time_budget_s
    found = search_fleet(question, report_note, lambda: time.monotonic() > deadline_s, showing)
    provenance = (
        calibrated_provenance(machines)
        if machines
        else provenance_of(engine, costs, question, found)
    )
    warnings = warnings_of(found, search.time_budget_s)
    figures = {
        **msgspec.to_builtins(found),
        "asked": {
            "traffic": asked(traffic_flags),
            "slo": msgspec.to_builtins(traffic.profile.slo),
            "demand": msgspec.to_builtins(traffic.demand),
        },
        "warnings": warnings,
        "provenance": msgspec.to_builtins(provenance),
    }
    tables = [rows_table(found, traffic.profile.slo), *words_tables(found)]
    give(figures, tables, front_chart(found), answer, warnings=warnings, provenance=provenance)
    return 0 if found.best else 1


# ---- what is asked for


def traffic_of(flags: TrafficFlags) -> Traffic:
    """Raises ConfigError for numbers out of range, and for what is no trace."""
    if flags.requests is not None:
        check_range("--requests", flags.requests, MIN_REQUESTS, 1e7)
    profile = CHAT if flags.workload is None else profile_named(flags.workload)
    slo = limits(flags, profile)
    if flags.trace is not None:
        return trace_traffic(flags, slo)
    if flags.speed is not None:
        raise ConfigError("--speed is of a trace", hint="say --load instead")
    lengths = {
        f"{name}_tokens": value
        for name in ("prompt", "output")
        if (value := getattr(flags, name)) is not None
    }
    for name, value in lengths.items():
        check_range(f"--{name.partition('_')[0]}", value, 1, 1 << 20)
    load = USUAL_LOAD_PER_S if flags.load is None else flags.load
    check_range("--load", load, 1e-3, 1e5)
    profile = msgspec.structs.replace(profile, slo=slo, **lengths)
    return Traffic(profile=profile, load_per_s=load, num_requests=flags.requests or USUAL_REQUESTS)


def trace_traffic(flags: TrafficFlags, slo: Slo) -> Traffic:
    for name in ("load", "prompt", "output"):
        if getattr(flags, name) is not None:
            raise ConfigError(
                f"--{name} is of a made-up workload", hint="leave it out, or --trace; see --speed"
            )
    speed = 1.0 if flags.speed is None else check_range("--speed", flags.speed, 1e-6, 1e6)
    requests = [
        msgspec.structs.replace(one, arrival_s=one.arrival_s / speed)
        for one in read_trace(str(flags.trace))[: flags.requests or USUAL_REQUESTS]
    ]
    if len(requests) < MIN_REQUESTS:
        raise ConfigError(f"the trace {flags.trace} holds {len(requests)} requests: too few")
    return Traffic.of_trace(requests, slo, speed=speed)


def asked(flags: TrafficFlags) -> dict[str, object]:
    return {name: getattr(flags, name) for name in flags.__dataclass_fields__}


def costs_of(
    gpus: Sequence[str], prices: Sequence[str], worker: WorkerFlags, engine: Engine
) -> list[DataSheetCostModel]:
    presets = presets_with(worker.presets)
    own = dict(price_of(words, presets) for words in prices)
    accelerators = [presets.accelerator(name) for name in gpus]
    unused = set(own) - {one.name for one in accelerators}
    if unused:
        raise ConfigError(
            f"--price of {min(unused)}, which is not searched", hint="name it by --gpu"
        )
    return [
        DataSheetCostModel(
            model=presets.model(worker.model),
            accelerator=priced(one, own.get(one.name)),
            weight_dtype=check_dtype("--weights", worker.weights),
            kv_dtype=check_dtype("--kv-dtype", worker.kv_dtype or engine.kv_dtype(worker.weights)),
            efficiency=engine.efficiency,
        )
        for one in accelerators
    ]


def priced(accelerator: Accelerator, usd_per_hour: float | None) -> Accelerator:
    """With its own price, where another is None."""
    if usd_per_hour is None:
        return accelerator
    return msgspec.structs.replace(accelerator, price_usd_per_hour=usd_per_hour)


def price_of(words: str, presets: Presets) -> tuple[str, float]:
    """GPU=USD"""
    name, equals, number = words.rpartition("=")
    try:
        usd = float(number) if equals else float("nan")
    except ValueError:
        usd = float("nan")
    if not 0 < usd < 1e6:
        raise ConfigError(f"--price is {words!r}", hint='say GPU=USD an hour, as "H100 SXM=2.5"')
    return presets.accelerator(name).name, usd


def check_machines(search: SearchFlags) -> None:
    for name in ("gpu", "tp", "pp", "ep"):
        if getattr(search, name):
            raise ConfigError(
                f"--cost FILE says what runs already, and --{name} too", hint="leave one out"
            )


def modes_of(search: SearchFlags) -> list[str]:
    return [find("split", name, MODES) for name in search.split] or list(MODES.values())


def shapes_of(search: SearchFlags, costs: Sequence[DataSheetCostModel]) -> list[Shape]:
    """Raises ConfigError for layouts of which none can be."""
    for name in ("tp", "pp", "ep"):
        for size in getattr(search, name):
            check_range(f"--{name}", size, 1, 1024)
    layouts = tuple(every_layout(search.tp or USUAL_WIDTHS, search.pp or (1,), search.ep or (1,)))
    if not layouts:
        raise ConfigError(
            f"--ep {search.ep} holds no multiple of --tp {search.tp}",
            hint="ranks that share experts are whole replicas of attention",
        )
    check_layouts(search, layouts, costs[0].model)
    return list(every_shape(costs, layouts, modes_of(search)))


def check_layouts(search: SearchFlags, layouts: Sequence[Layout], model: ModelShape) -> None:
    """Raises ConfigError for a size that was asked for and is in no layout that can be."""
    faults = [(layout, model.layout_fault(layout)) for layout in layouts]
    for name in ("tp", "pp", "ep"):
        for size in getattr(search, name):
            own = [fault for layout, fault in faults if getattr(layout, name) == size]
            if all(own):
                why = own[0] if own else "no layout has so many"
                raise ConfigError(
                    f"--{name} {size}: {model.name} cannot be laid out so: {why}",
                    hint="`headrace plan parallel --gpus N` lists every layout that can be",
                )


def question_of(
    search: SearchFlags, worker: WorkerFlags, traffic: Traffic, shapes: Sequence[Shape]
) -> FleetQuestion:
    check_range("--attainment", search.attainment, 0.01, 1.0)
    check_range("--seeds", search.seeds, 1, MAX_SEEDS)
    check_range("--max-gpus", search.max_gpus, 1, 4096)
    check_worker(worker)
    check_range("--pairs", search.pairs, 0, 1000)
    check_policies(search.policy)
    usual = FleetQuestion(shapes=(), traffic=traffic)
    return FleetQuestion(
        shapes=tuple(shapes),
        traffic=traffic,
        attainment=search.attainment,
        seeds=tuple(range(worker.seed, worker.seed + search.seeds)),
        policies=search.policy or usual.policies,
        step_tokens=step_tokens_of(worker, is_calibrated=bool(search.cost)),
        block_size=worker.block_size,
        max_gpus=search.max_gpus,
        kv_link_bytes_per_s=(worker.kv_link_gb_s or 0.0) * 1e9,
        num_pairs=search.pairs,
    )


def step_tokens_of(worker: WorkerFlags, *, is_calibrated: bool) -> int:
    """0 = a calibrated engine's own."""
    return worker.step_tokens or (0 if is_calibrated else USUAL_STEP_TOKENS)


def check_worker(worker: WorkerFlags) -> None:
    if worker.step_tokens is not None:
        check_range("--step-tokens", worker.step_tokens, 16, 1 << 20)
    check_range("--block-size", worker.block_size, 1, 4096)
    if worker.kv_link_gb_s is not None:
        check_range("--kv-link-gb-s", worker.kv_link_gb_s, 1e-6, 1e6)


def check_policies(names: Sequence[str]) -> None:
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy is {name!r}", hint="known: " + ", ".join(POLICIES))


# ---- what comes of it


def provenance_of(
    engine: Engine,
    costs: Sequence[DataSheetCostModel],
    question: FleetQuestion,
    found: FleetAnswer,
) -> Provenance:
    """Of all accelerators together; extrapolations are those of the shapes that were measured."""
    sources: dict[str, None] = {}
    beyond: dict[str, None] = {}
    measured = [one for row in found.rows for one in (row.prefill_worker, row.decode_worker)]
    demand = question.traffic.demand
    kinds = {str(shape.decode): shape.decode for shape in question.shapes}.values()
    for worker in (kind for kind in kinds if isinstance(kind, Kind)):
        own = engine.provenance(worker.cost, concurrency=1, context_tokens=demand.context_tokens)
        sources |= dict.fromkeys(own.sources)
        if WorkerRow.of(worker) in measured:
            beyond |= dict.fromkeys(own.extrapolates)
    prices = ", ".join(
        f"{cost.accelerator.name} ${cost.accelerator.price_usd_per_hour:g}"
        for cost in costs
        if cost.accelerator.price_usd_per_hour
    )
    if prices:
        sources[f"prices an hour, of the table, --presets or --price: {prices}"] = None
    kind = "data sheet" if engine.fit is None else "fitted"
    return Provenance(kind=kind, sources=tuple(sources), extrapolates=tuple(beyond))


def warnings_of(found: FleetAnswer, budget_s: float) -> list[str]:
    warnings = []
    if not found.is_complete:
        warnings.append(
            f"the time budget of {budget_s:g} s ended the search: what was not tried may be cheaper"
        )
    best = found.best
    if best is None:
        warnings.append("nothing that was tried holds the limits")
    elif best.attainment.low is not None and best.attainment.low < found.attainment:
        warnings.append(
            f"the best holds on average, and its interval begins below {found.attainment:.1%}: "
            "more --seeds or --requests would tell"
        )
    return warnings


def rows_table(found: FleetAnswer, slo: Slo) -> Table:
    stated = [
        f"{name.removesuffix('_ms').upper()} {limit:g} ms"
        for name, limit in msgspec.structs.asdict(slo).items()
        if limit is not None
    ]
    title = (
        f"{found.load_per_s:.3g} requests/s, {found.attainment:.1%} within "
        f"{', '.join(stated) or 'no limit'}; {found.num_requests_per_run} requests a run, "
        f"{len(found.seeds)} seeds, {found.num_runs} runs"
    )
    columns = ("GPUs", "$/h", "$/M good tokens", "good", "TTFT p99", "TPOT p99", "cached", "")
    table = right_aligned(title, "fleet", *columns)
    for row in found.rows:
        table.add_row(
            row.name,
            str(row.num_gpus),
            f"{row.usd_per_hour:.2f}",
            spanned(row.usd_per_million_good_output_tokens, "{:.3f}"),
            spanned(row.attainment, "{:.1%}"),
            "" if row.ttft_p99_ms is None else f"{row.ttft_p99_ms:,.0f} ms",
            "" if row.tpot_p99_ms is None else f"{row.tpot_p99_ms:,.1f} ms",
            f"{row.hit_rate:.1%}",
            marks(row, found),
        )
    return table


def spanned(interval: Interval | None, form: str) -> str:
    """0.213 (0.208 to 0.218)"""
    if interval is None:
        return "none good"
    mean = form.format(interval.mean)
    if interval.low is None or interval.high is None:
        return mean
    return f"{mean} ({form.format(interval.low)} to {form.format(interval.high)})"


def marks(row: FleetRow, found: FleetAnswer) -> str:
    is_best = found.best is not None and row.name == found.best.name
    words = ("best", is_best), ("front", row.is_on_front), ("misses", not row.holds)
    return ", ".join(word for word, is_so in words if is_so)


def words_tables(found: FleetAnswer) -> list[Table]:
    """What binds and who comes next; what was refused, and why."""
    words = right_aligned("", "", "", num_left=2)
    if found.best:
        words.add_row("best", found.best.name)
    if found.binds:
        words.add_row("binds", f"{found.binds.constraint}: {found.binds.reason}")
    if found.runner_up:
        more = spanned(found.runner_up.more, "{:+.1%}")
        noise = ", within the noise" if found.runner_up.is_within_noise else ""
        words.add_row("runner-up", f"{found.runner_up.name}: {more} of the cost{noise}")
    refused = right_aligned("not tried further", "shape", "by", "why", num_left=3)
    for one in found.refused:
        refused.add_row(one.shape, one.constraint, one.reason)
    return [table for table in (words, refused) if table.row_count]


def front_chart(found: FleetAnswer) -> Chart:
    points = [
        (row.usd_per_million_good_output_tokens.mean, row.attainment.mean * 100.0, row)
        for row in found.rows
        if row.usd_per_million_good_output_tokens is not None
    ]
    front = [(cost, good) for cost, good, row in points if row.is_on_front]
    return Chart(
        title="what good answers cost",
        x_label="USD per million output tokens of good requests",
        y_label="good requests, %",
        lines=[Line("front", front)] if front else [],
        marks=[Mark(row.name, (cost, good)) for cost, good, row in points],
    )
