"""Everything that one benchmark run measured, as JSON and as tables.

Decides which figures are shown; refuses to judge them.
"""

import msgspec
from rich.console import Console

from headrace.bench.front import FrontReport
from headrace.bench.gateway import GatewayReport
from headrace.bench.install import Install
from headrace.bench.kernels import KernelReport
from headrace.bench.loads import LoadFailure, LoadReport
from headrace.bench.machine import Machine
from headrace.bench.precision import Precision
from headrace.bench.router import RouterReport
from headrace.bench.routing import PolicyReport
from headrace.bench.scheduler import StepOverhead
from headrace.bench.sides import Comparison, Side
from headrace.bench.tables import (
    comparison_table,
    front_table,
    gateway_table,
    kernel_table,
    limit_table,
    load_table,
    policy_table,
    precision_table,
    router_table,
    scheduler_table,
    transfer_table,
)
from headrace.bench.transfer import TransferReport
from headrace.core.config.units import counted


class Results(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Parts that were not asked for are absent."""

    machine: Machine
    server: str = ""
    ready_after_s: float | None = None  # process start to the first 200 of /ready
    peak_memory_bytes: int | None = None
    loads: list[LoadReport] = msgspec.field(default_factory=list)
    failures: list[LoadFailure] = msgspec.field(default_factory=list)  # loads without figures
    sides: list[Side] = msgspec.field(default_factory=list)
    comparisons: list[Comparison] = msgspec.field(default_factory=list)
    scheduler: list[StepOverhead] = msgspec.field(default_factory=list)
    router: RouterReport | None = None
    policies: list[PolicyReport] = msgspec.field(default_factory=list)
    gateway: GatewayReport | None = None
    front: FrontReport | None = None
    transfer: TransferReport | None = None
    precision: list[Precision] = msgspec.field(default_factory=list)
    install: Install | None = None
    kernels: KernelReport | None = None

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def show(results: Results, console: Console) -> None:
    """Print what was measured."""
    facts = results.machine
    console.print(
        f"{facts.cpu} · {facts.num_cores} cores ({', '.join(facts.isa)}) · "
        f"{facts.memory_bytes / 2**30:.0f} GiB · load {facts.load_average:.1f} · "
        f"Python {facts.python} · headrace {facts.versions['headrace']}"
    )
    if results.ready_after_s is not None and results.peak_memory_bytes is not None:
        console.print(
            f"ready after {results.ready_after_s:.2f} s · "
            f"peak memory {results.peak_memory_bytes / 2**20:.0f} MiB"
        )
    if results.loads:
        console.print(load_table(results.loads))
    if results.comparisons:
        console.print(comparison_table(results.sides, results.comparisons))
    for one in results.failures:
        line = f"no figures of {one.load} at {one.url} ({one.model}): {one.reason}"
        console.print(line, markup=False, soft_wrap=True)
    if results.scheduler:
        console.print(scheduler_table(results.scheduler))
    if results.router:
        console.print(router_table(results.router))
    if results.policies:
        console.print(policy_table(results.policies))
    if results.gateway:
        console.print(gateway_table(results.gateway))
    if results.front:
        console.print(front_table(results.front))
    if results.transfer:
        console.print(transfer_table(results.transfer))
    if results.precision:
        console.print(precision_table(results.precision))
    if results.install:
        console.print(
            f"fresh installation: {results.install.venv_bytes / 2**20:.0f} MiB in "
            f"{results.install.install_s:.0f} s, "
            f"{results.install.num_distributions} distributions, of these headrace "
            f"{results.install.headrace_bytes / 2**20:.1f} MiB"
        )
    if results.kernels:
        show_kernels(results.kernels, console)


def show_kernels(report: KernelReport, console: Console) -> None:
    """Print the limits of the machine and how near the kernels of a model come to them."""
    console.print(
        f"{report.model} ({report.weight_types}) · "
        f"{counted(report.limits.num_threads, 'thread')} · "
        f"{report.limits.isa}"
    )
    console.print(limit_table(report.limits))
    console.print(kernel_table("steps", report.steps))
    console.print(kernel_table("single operations", report.operations))
    for line in report.left_out:
        console.print(f"left out: {line}")
