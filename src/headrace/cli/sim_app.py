"""`headrace sim`: what it takes, and its help."""

from typing import Annotated

from cyclopts import Parameter

from headrace.cli.sim_flags import SimFlags


def sim(
    *,
    config: Annotated[
        str | None,
        Parameter(help="TOML file with the same names as these flags", show_default=False),
    ] = None,
    flags: SimFlags | None = None,
    json: Annotated[
        bool, Parameter(negative="", help="print figures as JSON", show_default=False)
    ] = False,
) -> int:
    """Simulate a cluster under a workload or a trace: goodput, latencies, why limits are missed.

    Front end, router and engines are those of `serve`; steps take what a data sheet, a fitted
    engine or a recorded one says.
    """
    from headrace.cli.sim import sim as command

    return command(flags or SimFlags(), config, as_json=json)
