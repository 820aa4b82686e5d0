"""`headrace plan goodput`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from headrace.cli.plan_answer import check_plot, give, right_aligned
from headrace.cli.plan_flags import (
    AnswerFlags,
    LayoutFlags,
    SimulatorFlags,
    TargetFlags,
    WorkloadFlags,
)
from headrace.cli.plan_machine import CalibratedMachine, DataSheetMachine, Machine
from headrace.cli.plan_target import check_range, engine_and_cost, profile_of, reference_cost
from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo
from headrace.core.workload.profiles import WorkloadProfile
from headrace.plan.engines import Engine
from headrace.plan.goodput import Goodput, Verdict, compute_goodput, gains
from headrace.plan.picture import Chart, Line
from headrace.plan.reference import REFERENCE_LOAD_PER_S, REFERENCE_TRAFFIC
from headrace.plan.service import ServiceTimes

if TYPE_CHECKING:
    from headrace.sim.setup import Device

MAX_WORKERS = 4096
USUAL_ATTAINMENT = 0.9


@dataclass(frozen=True, kw_only=True)
class GoodputAsked:
    """What is said beside what runs and the workload; None = what the preset or most people say."""

    preset: str | None
    load_per_s: float | None
    num_gpus: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    chunk_tokens: int
    design_batch_seqs: int | None
    kv_link_gb_per_s: float | None
    calibration: str | None  # file
    with_page: bool
    simulator: SimulatorFlags


def goodput(
    asked: GoodputAsked,
    target: TargetFlags | None,
    layout: LayoutFlags | None,
    workload: WorkloadFlags | None,
    answer: AnswerFlags,
) -> int:
    check_plot(answer)
    check_simulator(asked.simulator)
    machine = machine_of(asked, target, layout)
    is_reference = asked.preset is not None
    profile = profile_of(workload, REFERENCE_TRAFFIC) if is_reference else profile_of(workload)
    service = service_times(asked, machine, profile)
    slo = limits(asked, profile)
    load = asked.load_per_s
    if load is None:
        load = REFERENCE_LOAD_PER_S if is_reference else service.capacity_per_s / 2
    check_range("--load", load, 1e-6, 1e6)
    found = compute_goodput(service, slo, load, with_page=asked.with_page)
    if asked.simulator.simulate is not None:
        found = with_simulator(found, asked.simulator, service, slo, machine.device())
    provenance = machine.provenance(service)
    num_seqs = max((one.decode_seqs or 0.0) for one in found.verdicts)
    warnings = [*machine.warnings(service, num_seqs), *unbroken(found, asked.simulator)]
    figures = {
        **msgspec.to_builtins(found),
        "warnings": warnings,
        "provenance": msgspec.to_builtins(provenance),
    }
    tables = [verdict_table(found)]
    return give(figures, tables, curves(found), answer, warnings=warnings, provenance=provenance)


def machine_of(
    asked: GoodputAsked, target: TargetFlags | None, layout: LayoutFlags | None
) -> Machine:
    """Raises ConfigError for what does not exist, or is said twice."""
    if asked.calibration is not None:
        if asked.preset is not None or target is not None or layout is not None:
            raise ConfigError(
                "--cost FILE says what runs already", hint="leave out the flags of what runs"
            )
        if asked.kv_link_gb_per_s is not None:
            raise ConfigError(
                "--kv-link-gb-s: a calibration does not know how large KV is",
                hint="calibrate workers that hand it over, and its copies are in the file",
            )
        return CalibratedMachine(asked.calibration, asked.num_gpus)
    if asked.preset is not None:
        return DataSheetMachine(Engine(), reference_cost(asked.preset, target, layout))
    engine, cost = engine_and_cost(target or TargetFlags(), layout)
    if cost.layout.dp > 1:
        raise ConfigError("--dp is the number of workers here", hint="say --gpus instead")
    if cost.layout.pp > 1:
        raise ConfigError("--pp: stages overlap, which these models do not know", hint="say --tp")
    return DataSheetMachine(engine, cost)


def check_simulator(asked: SimulatorFlags) -> None:
    """Raises ConfigError for numbers out of range, and for words that would mean nothing."""
    if asked.simulate is not None:
        check_range("--simulate", asked.simulate, 1, 1e7)
        check_range("--attainment", attainment_of(asked), 0.01, 1.0)
        return
    for name in ("attainment", "seed"):
        if getattr(asked, name) is not None:
            raise ConfigError(
                f"--{name} is of a simulation, and the formulas know means only",
                hint="say --simulate N, or leave it out",
            )


def attainment_of(asked: SimulatorFlags) -> float:
    return USUAL_ATTAINMENT if asked.attainment is None else asked.attainment


def service_times(asked: GoodputAsked, machine: Machine, profile: WorkloadProfile) -> ServiceTimes:
    """Raises ConfigError for numbers out of range."""
    num_gpus = machine.usual_gpus if asked.num_gpus is None else asked.num_gpus
    per_worker = machine.gpus_per_worker
    check_range("--gpus", num_gpus, 1, MAX_WORKERS * per_worker)
    if num_gpus % per_worker:
        raise ConfigError(
            "devices are left over",
            gpus=num_gpus,
            per_worker=per_worker,
            hint=f"make --gpus a multiple of {per_worker}",
        )
    check_range("--chunk", asked.chunk_tokens, 1, 1 << 20)
    batch = asked.design_batch_seqs
    num_seqs = machine.usual_batch_seqs if batch is None else batch
    check_range("--design-batch", num_seqs, 1, 1 << 16)
    rate = asked.kv_link_gb_per_s
    if rate is not None:
        check_range("--kv-link-gb-s", rate, 1e-6, 1e6)
    return ServiceTimes(
        cost=machine.cost,
        num_workers=num_gpus // per_worker,
        prompt_tokens=profile.prompt_tokens,
        output_tokens=profile.output_tokens,
        design_batch_seqs=num_seqs,
        chunk_tokens=asked.chunk_tokens,
        kv_link_bytes_per_s=rate * 1e9 if rate is not None else None,
        kv_copy_s=machine.kv_copy_s(profile.prompt_tokens),
    )


def with_simulator(
    found: Goodput, asked: SimulatorFlags, service: ServiceTimes, slo: Slo, device: "Device"
) -> Goodput:
    from headrace.cli.sim_progress import showing
    from headrace.sim.goodput import Judge, simulated_verdicts

    judge = Judge(
        service=service,
        slo=slo,
        device=device,
        num_requests=asked.simulate or 0,
        attainment=attainment_of(asked),
        seed=asked.seed or 0,
        watching=showing,
    )
    verdicts = (*found.verdicts, *simulated_verdicts(judge, found.load_per_s))
    return msgspec.structs.replace(found, verdicts=verdicts, gain_by_model=gains(verdicts))


def unbroken(found: Goodput, asked: SimulatorFlags) -> list[str]:
    """A warning where the simulator's largest load is only the largest that it tried."""
    from headrace.sim.goodput import NOTHING_FOUND, SIMULATED

    modes = [
        f"{one.mode} ({_rate(one.sustainable_per_s, 1)}/s)"
        for one in found.verdicts
        if (one.model, one.binds) == (SIMULATED, NOTHING_FOUND)
    ]
    if not modes:
        return []
    return [
        f"with {asked.simulate} requests no load that was tried broke a limit of"
        f" {', '.join(modes)}: more of them (--simulate) give queues the time to grow"
    ]


def limits(asked: GoodputAsked, profile: WorkloadProfile) -> Slo:
    given = {"ttft_ms": asked.ttft_ms, "tpot_ms": asked.tpot_ms}
    stated = {name: limit for name, limit in given.items() if limit is not None}
    for name, limit in stated.items():
        check_range(f"--{name.replace('_', '-')}", limit, 1e-3, 1e9)
    return msgspec.structs.replace(profile.slo, **stated)


def verdict_table(found: Goodput) -> Table:
    stated = {"TTFT": found.slo.ttft_ms, "TPOT": found.slo.tpot_ms, "E2E": found.slo.e2e_ms}
    words = ", ".join(f"{name} {ms:g} ms" for name, ms in stated.items() if ms is not None)
    title = (
        f"{found.load_per_s:.3g} requests/s, workers: {found.num_workers}"
        f" (capacity {_rate(found.capacity_per_s, 0)}/s), {words}"
    )
    columns = ("model", "mode", "workers", "TTFT", "TPOT", "decoding", "good", "at most", "binds")
    table = right_aligned(title, *columns, num_left=2)
    for one in found.verdicts:
        table.add_row(
            one.model,
            one.mode,
            workers(one, found.num_workers),
            whole_ms(one.ttft_s),
            whole_ms(one.tpot_s),
            f"{one.decode_seqs:.0f}" if one.decode_seqs is not None else "",
            "yes" if one.is_good else "no",
            f"{_rate(one.sustainable_per_s, 1)}/s",
            one.binds,
        )
    for model, gain in found.gain_by_model.items():
        table.add_row(model, "disaggregated to prefill first", *[""] * 5, f"{gain:.1f}×", "")
    return table


def whole_ms(value_s: float | None) -> str:
    return "overloaded" if value_s is None else f"{value_s * 1000:.0f} ms"


def workers(one: Verdict, num_workers: int) -> str:
    if one.prefill_workers is None or one.decode_workers is None:
        return str(num_workers)
    is_whole = one.prefill_workers == int(one.prefill_workers)
    digits = 0 if is_whole else 1
    return f"{one.prefill_workers:.{digits}f} / {one.decode_workers:.{digits}f}"


def curves(found: Goodput) -> Chart:
    return Chart(
        title="goodput by load",
        x_label="load, requests/s",
        y_label="goodput, requests/s",
        lines=[
            Line(
                f"{one.model}: {one.mode} ({workers(one, found.num_workers)})",
                one.goodput_per_s_by_load,
            )
            for one in found.verdicts
        ],
    )


def _rate(per_s: float, decimals: int) -> str:
    """With so many decimals, or with two digits where these would hardly show it."""
    is_small = 0 < per_s < 10 ** (1 - decimals)
    return f"{per_s:.2g}" if is_small else f"{per_s:.{decimals}f}"
