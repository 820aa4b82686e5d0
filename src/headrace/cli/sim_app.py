"""`headrace sim` and its parts: what they take, and their help."""

from typing import Annotated

from cyclopts import App, Parameter

from headrace.cli.flags import Json
from headrace.cli.sim_flags import SimFlags
from headrace.cli.sim_whatif_flags import MachineFlags, SloFlags, WhatIfFlags

Like = Annotated[
    str,
    Parameter(
        help="another recording, whose workers stand for engines of others", show_default=False
    ),
]

sim = App(
    name="sim",
    help="""Simulate a cluster under a workload, a trace or recorded traffic: goodput, latencies,
    why limits are missed.

    Front end, router and engines are those of `serve`; steps take what a data sheet, a fitted
    engine or a recorded one says.
    """,
)


@sim.default
def workload(
    *,
    config: Annotated[
        str | None,
        Parameter(help="TOML file with the same names as these flags", show_default=False),
    ] = None,
    flags: SimFlags | None = None,
    json: Json = False,
) -> int:
    """Serve a workload or a trace on workers that somebody describes."""
    from headrace.cli.sim import sim as command

    return command(flags or SimFlags(), config, as_json=json)


@sim.command
def run(
    log: Annotated[str, Parameter(help="file written with --record or --event-log")],
    /,
    *,
    seed: Annotated[int, Parameter(help="of what the router draws")] = 0,
    like: Like = "",
    machine: MachineFlags | None = None,
    limits: SloFlags | None = None,
    json: Json = False,
) -> int:
    """Simulate recorded traffic as it was served, and say how near that comes.

    An event log is decided again with its own step times; exit code 1 if a decision is not as
    recorded.
    """
    from headrace.cli.sim_run import run as command
    from headrace.cli.sim_whatif import slo_of

    slo = slo_of(limits or SloFlags())
    return command(log, slo, machine or MachineFlags(), like=like, seed=seed, as_json=json)


@sim.command
def whatif(
    log: Annotated[str, Parameter(help="file written with --record")],
    /,
    *,
    like: Like = "",
    flags: WhatIfFlags | None = None,
    machine: MachineFlags | None = None,
    limits: SloFlags | None = None,
    json: Json = False,
) -> int:
    """Serve recorded traffic with another configuration: goodput, latencies and cost beside those
    of the recorded one, with intervals.
    """
    from headrace.cli.sim_whatif import slo_of
    from headrace.cli.sim_whatif import whatif as command

    slo, asked = slo_of(limits or SloFlags()), flags or WhatIfFlags()
    return command(log, asked, slo, machine or MachineFlags(), like=like, as_json=json)
