"""`headrace sim`: a cluster that does not exist, serving traffic that somebody describes."""

import tomllib
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.cli.output import print_json, print_table
from headrace.cli.plan_answer import report_provenance
from headrace.cli.plan_flags import DEFAULT_GPU, DEFAULT_MODEL, LayoutFlags, TargetFlags
from headrace.cli.plan_fleet_flags import POLICIES
from headrace.cli.plan_target import check_range, engine_and_cost
from headrace.cli.sim_answer import asked_words, scaling_rows, scaling_table, tables
from headrace.cli.sim_cost import provenance_of, with_beyond
from headrace.cli.sim_flags import SimFlags
from headrace.cli.sim_load import check_load, half_of_capacity
from headrace.cli.sim_progress import showing
from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo
from headrace.core.config.autoscaler import AutoscalerConfig
from headrace.core.config.schema import RouterConfig
from headrace.core.cost.fitted import FittedCostModel, Link
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.arrivals import Arrivals
from headrace.core.workload.closed_loop import ClosedLoop
from headrace.core.workload.profiles import (
    WorkloadProfile,
    profile_named,
)
from headrace.core.workload.replay import TraceSource
from headrace.core.workload.source import Source
from headrace.core.workload.synthetic import Synthetic, SyntheticSource
from headrace.core.workload.traces import TraceRequest, parse_trace, spread
from headrace.live.cost_file import read_calibration
from headrace.live.event_log import EventLogReader
from headrace.models.files import open_regular
from headrace.plan.engines import Provenance
from headrace.sim.cluster import simulate_cluster
from headrace.sim.recorded import step_samples
from headrace.sim.scaling import Autoscale
from headrace.sim.setup import VOCAB, Device, Faults, Layout, build_cluster
from headrace.sim.summary import Tally
from headrace.sim.watched import WatchedCost

USUAL_STEP_TOKENS = 2048


class Limited(Protocol):
    """Limits that were given; None = the workload's."""

    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def itl_ms(self) -> float | None: ...
    @property
    def e2e_ms(self) -> float | None: ...


class TrafficAsked(Limited, Protocol):
    """What says which requests there are and how they are judged. None = as the workload has it."""

    @property
    def workload(self) -> str: ...
    @property
    def prompt(self) -> int | None: ...
    @property
    def output(self) -> int | None: ...


class SimAsked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is simulated, complete. Fields are those of SimFlags; a TOML file has the same keys."""

    workload: str = "chat"
    trace: str = ""
    speed: float = 1.0
    requests: int | None = None
    load: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0
    rates: tuple[tuple[float, float], ...] = ()  # (second, requests per second): a ramp
    prompt: int | None = None
    output: int | None = None
    spread: float | None = None
    shared: float | None = None
    warm_up_s: float = 0.0
    seed: int = 0
    mixed: int | None = None
    prefill: int = 0
    decode: int = 0
    model: str = DEFAULT_MODEL
    gpu: str = DEFAULT_GPU
    weights: str = "bf16"
    kv_dtype: str | None = None
    engine: str = "vllm"
    tp: int = 1
    presets: str | None = None
    steps: str = ""
    cost: str = ""
    sharing: int | None = None
    step_tokens: int | None = None
    block_size: int = 16
    policy: str = "kv"
    handoff: str = "auto"
    kv_link_gb_s: float = 50.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None
    mean_life_s: float = 0.0
    start_up_s: float = 30.0
    autoscale: bool = False
    min_workers: int = 1
    max_workers: int | None = None
    role_cooldown_s: float = 120.0

    @classmethod
    def of(cls, flags: SimFlags, file: str | None) -> "SimAsked":
        """Flags before the file, the file before defaults. Raises ConfigError."""
        given = {name: value for name, value in asdict(flags).items() if value is not None}
        try:
            told = tomllib.loads(Path(file).expanduser().read_text("utf-8")) if file else {}
            return msgspec.convert({**told, **given}, cls)
        except (OSError, ValueError, RecursionError) as error:
            where = f" in {file}" if file else ""
            raise ConfigError(f"cannot simulate what is said{where}: {error}") from error

    def check(self) -> None:
        """Raises ConfigError for numbers out of range."""
        check_range("--requests", 1 if self.requests is None else self.requests, 1, 1e8)
        check_range("--load", 1.0 if self.load is None else self.load, 1e-6, 1e7)
        check_range("--concurrency", 1 if self.concurrency is None else self.concurrency, 1, 1e6)
        check_range("--speed", self.speed, 1e-6, 1e6)
        check_range("--burstiness", self.burstiness, 0.0, 1e4)
        check_range("--step-tokens", self.step_tokens or USUAL_STEP_TOKENS, 16, 1 << 20)
        check_range("--sharing", 1 if self.sharing is None else self.sharing, 1, 4096)
        check_range("--block-size", self.block_size, 1, 4096)
        check_range("--kv-link-gb-s", self.kv_link_gb_s, 1e-6, 1e6)
        check_range("--spread", 0.0 if self.spread is None else self.spread, 0.0, 10.0)
        check_range("--shared", 0.0 if self.shared is None else self.shared, 0.0, 0.99)
        for name in ("mixed", "prefill", "decode"):
            check_range(f"--{name}", getattr(self, name) or 0, 0, 4096)
        check_range("--min-workers", self.min_workers, 0, 4096)
        check_range("--max-workers", 1 if self.max_workers is None else self.max_workers, 1, 4096)
        for name in ("warm_up_s", "mean_life_s", "start_up_s", "role_cooldown_s"):
            check_range(f"--{name.replace('_', '-')}", getattr(self, name), 0.0, 1e9)
        for name, known in (
            ("policy", POLICIES),
            ("handoff", ("auto", "always", "never")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"--{name} is {getattr(self, name)!r}", hint="known: " + ", ".join(known)
                )


def sim(flags: SimFlags, file: str | None, *, as_json: bool) -> int:
    asked = SimAsked.of(flags, file)
    asked.check()
    check_load(asked)
    device, provenance = device_of(asked)
    profile = profile_of(asked)
    if asked.shared is not None:
        profile = msgspec.structs.replace(profile, shared_share=asked.shared)
    slo = limits(asked, profile)
    layout = layout_of(asked)
    load = load_of(asked, profile, device, layout)
    source, num_requests = source_of(asked, profile, slo, device, load)
    cluster = build_cluster(
        device,
        layout,
        source,
        router=RouterConfig(policy=asked.policy, seed=asked.seed),
        handoff=asked.handoff,
        slo=slo,
        link=Link(latency_ns=10_000.0, byte_ns=1.0 / asked.kv_link_gb_s),
        faults=Faults(mean_life_s=asked.mean_life_s, start_up_s=asked.start_up_s),
        autoscale=autoscale_of(asked, layout),
        seed=asked.seed,
    )
    tally = Tally(asked.warm_up_s, is_closed=asked.concurrency is not None)
    with showing("", num_requests) as seen:

        def take(record: RequestRecord) -> None:
            tally.add(record)
            seen(record.finished_ns)

        report = simulate_cluster(cluster, on_record=take)
    summary = tally.summary(report)
    if isinstance(device.cost, WatchedCost):
        provenance = with_beyond(provenance, device.cost.beyond())
    if as_json:
        told = {"asked": asked, "slo": slo, "provenance": provenance}
        figures = {**msgspec.to_builtins(summary), **msgspec.to_builtins(told)}
        if report.scaling is not None:
            figures["decisions"] = scaling_rows(report.scaling)
        print_json(figures | {"load_asked_per_s": load, "importance": profile.importance})
        return 0
    for table in tables(summary, slo, asked_words(summary, load, profile)):
        print_table(table)
    if report.scaling is not None:
        print_table(scaling_table(report.scaling))
    report_provenance(provenance)
    return 0


# ---- what is asked for


def device_of(asked: SimAsked) -> tuple[Device, Provenance]:
    if asked.steps and asked.cost:
        raise ConfigError("--steps and --cost both say what steps take", hint="leave out one")
    if asked.steps:
        return recorded_device(asked.steps)
    if asked.cost:
        found = read_calibration(Path(asked.cost).expanduser())
        device = Device.of_calibration(found, sharing=asked.sharing)
        return device, provenance_of(found, asked.cost, device.sharing)
    target = TargetFlags(
        model=asked.model,
        gpu=asked.gpu,
        weights=asked.weights,
        kv_dtype=asked.kv_dtype,
        engine=asked.engine,
        presets=asked.presets,
    )
    engine, cost = engine_and_cost(target, LayoutFlags(tp=asked.tp))
    device = Device.of_data_sheet(cost, block_size=asked.block_size)
    return device, engine.provenance(cost, concurrency=1, context_tokens=1)


def recorded_device(log: str) -> tuple[Device, Provenance]:
    """The steps of a recorded engine, and its memory."""
    with EventLogReader(Path(log).expanduser()) as reader:
        spec = reader.header.spec
        samples = list(step_samples(reader))
    if not samples:
        raise ConfigError(f"{log} has no step that ended")
    cost = FittedCostModel.fit(samples, name=f"fitted to {len(samples)} recorded steps")
    error = cost.residuals(samples)
    device = Device(
        cost=cost,
        believed=cost,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        kv_block_bytes=0,
        max_model_len=spec.max_model_len,
    )
    source = f"{len(samples)} steps of {log}, relative error {error.mean:.1%}, p90 {error.p90:.1%}"
    return device, Provenance(kind="fitted", sources=(source,))


def profile_of(asked: TrafficAsked) -> WorkloadProfile:
    profile = profile_named(asked.workload)
    lengths = {"prompt_tokens": asked.prompt, "output_tokens": asked.output}
    stated = {name: value for name, value in lengths.items() if value is not None}
    for name, value in stated.items():
        check_range(f"--{name.partition('_')[0]}", value, 1, 1 << 24)
    return msgspec.structs.replace(profile, **stated)


def limits(asked: Limited, profile: WorkloadProfile) -> Slo:
    """Raises ConfigError for numbers out of range."""
    names = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    stated = {name: limit for name in names if (limit := getattr(asked, name)) is not None}
    for name, limit in stated.items():
        check_range(f"--{name.replace('_', '-')}", limit, 1e-3, 1e9)
    return msgspec.structs.replace(profile.slo, **stated)


def layout_of(asked: SimAsked) -> Layout:
    num_mixed = asked.mixed if asked.mixed is not None else 0 if asked.prefill + asked.decode else 4
    return Layout(
        mixed=num_mixed,
        prefill=asked.prefill,
        decode=asked.decode,
        # A calibrated engine has its own.
        step_tokens=asked.step_tokens or (0 if asked.cost else USUAL_STEP_TOKENS),
    )


def autoscale_of(asked: SimAsked, layout: Layout) -> Autoscale | None:
    """Raises ConfigError for words of which one would have to be ignored."""
    if not asked.autoscale:
        if asked.max_workers is not None:
            raise ConfigError(
                f"--max-workers is {asked.max_workers}, and nobody would start or end any",
                hint="say --autoscale, too",
            )
        return None
    most = layout.num_workers if asked.max_workers is None else asked.max_workers
    num_pools = sum(num > 0 for num in (layout.mixed, layout.prefill, layout.decode))
    for num, what in (
        (asked.min_workers * num_pools, f"--min-workers is {asked.min_workers} for each pool"),
        (layout.num_workers, f"{layout.num_workers} workers are there at the begin"),
    ):
        if num > most:
            raise ConfigError(
                f"{what}, and --max-workers is {most}", hint=f"say --max-workers {num}, or fewer"
            )
    config = AutoscalerConfig(
        min_replicas=asked.min_workers,
        max_replicas=most,
        role_cooldown_s=asked.role_cooldown_s,
        start_up_s=asked.start_up_s,
    )
    return Autoscale(config=config, start_up_s=asked.start_up_s)


def load_of(
    asked: SimAsked, profile: WorkloadProfile, device: Device, layout: Layout
) -> float | None:
    """Requests per second that shall come; None where a trace, a ramp or clients say it."""
    if asked.trace or asked.rates or asked.concurrency:
        return None
    return asked.load or half_of_capacity(profile, device.cost, layout.num_workers)


def source_of(
    asked: SimAsked, profile: WorkloadProfile, slo: Slo, device: Device, load: float | None
) -> tuple[Source, int]:
    """With the number of its requests, as far as it is known."""
    source, num_requests = _requests_of(asked, profile, slo, device, load)
    if asked.concurrency:
        source = ClosedLoop(source, asked.concurrency)
    return source, num_requests


def _requests_of(
    asked: SimAsked, profile: WorkloadProfile, slo: Slo, device: Device, load: float | None
) -> tuple[Source, int]:
    if asked.trace:
        requests = spread(read_trace(asked.trace), asked.seed)[: asked.requests]
        source = TraceSource(
            requests, slo=slo, speed=asked.speed, vocab_size=VOCAB, seed=asked.seed
        )
        return source, len(requests)
    # Clients ask at no times of the workload's own.
    rates = asked.rates or ((0.0, load or 1.0),)
    workload = Synthetic(
        profile=msgspec.structs.replace(profile, slo=slo),
        arrivals=Arrivals(rates=rates, burstiness=asked.burstiness),
        num_requests=asked.requests or 1000,
        max_tokens=device.max_model_len,
        vocab_size=VOCAB,
        seed=asked.seed,
    )
    if asked.spread is not None:
        spreads = {"prompt_spread": asked.spread, "output_spread": asked.spread}
        workload = msgspec.structs.replace(workload, **spreads)
    return SyntheticSource(workload), workload.num_requests


def read_trace(file: str) -> list[TraceRequest]:
    """Raises ConfigError for what cannot be read, or is no trace."""
    with TextIOWrapper(open_regular(Path(file).expanduser()), encoding="utf-8") as lines:
        try:
            return parse_trace(lines)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"cannot read the trace {file}: {reason}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the trace {file} is not UTF-8 text") from error
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.message}", hint=error.hint, **error.data) from error
