"""The flags of `headrace plan`."""

from dataclasses import dataclass
from typing import Annotated, Final

from cyclopts import Group, Parameter

from headrace.cli.flags import Json

_TARGET = Group("What runs", sort_key=4)
_WORKLOAD = Group("Workload", sort_key=5)
_SIMULATOR = Group("Simulator", sort_key=6)
_OUTPUT = Group("Output", sort_key=7)

DEFAULT_MODEL: Final = "meta-llama/Meta-Llama-3.1-8B"
DEFAULT_GPU: Final = "H100 SXM"


@Parameter(name="*", group=_TARGET)
@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """Which model runs on what."""

    model: Annotated[str, Parameter(help="model of the tables, or of --presets")] = DEFAULT_MODEL
    gpu: Annotated[str, Parameter(help="accelerator, likewise")] = DEFAULT_GPU
    weights: Annotated[str, Parameter(help="type of the weights")] = "bf16"
    kv_dtype: Annotated[
        str | None,
        Parameter(
            help="type of keys and values; none = the engine's, else bf16", show_default=False
        ),
    ] = None
    engine: Annotated[
        str, Parameter(help="ideal (the data sheet), or an engine that was fitted")
    ] = "ideal"
    presets: Annotated[
        str | None, Parameter(help="TOML file with more models and GPUs", show_default=False)
    ] = None


@Parameter(name="*", group=_TARGET)
@dataclass(frozen=True, kw_only=True)
class LayoutFlags:
    """How the model lies on devices."""

    tp: Annotated[int, Parameter(help="tensor parallel ranks")] = 1
    pp: Annotated[int, Parameter(help="pipeline stages")] = 1
    ep: Annotated[int, Parameter(help="ranks that share whole experts: 1, or tp times dp")] = 1
    dp: Annotated[int, Parameter(help="replicas")] = 1


@Parameter(name="*", group=_WORKLOAD)
@dataclass(frozen=True, kw_only=True)
class WorkloadFlags:
    """What requests look like."""

    workload: Annotated[
        str | None, Parameter(help="chat (the default), agent or rag", show_default=False)
    ] = None
    prompt: Annotated[
        int | None, Parameter(help="prompt tokens; none = the workload's", show_default=False)
    ] = None
    output: Annotated[
        int | None, Parameter(help="output tokens; none = the workload's", show_default=False)
    ] = None


@Parameter(name="*", group=_SIMULATOR)
@dataclass(frozen=True, kw_only=True)
class SimulatorFlags:
    """What the simulator is asked beside models of means."""

    simulate: Annotated[
        int | None,
        Parameter(
            help="requests that are simulated at each load; none = nothing is", show_default=False
        ),
    ] = None
    attainment: Annotated[
        float | None,
        Parameter(
            help="share of requests that must be good at a simulated load; 0.9", show_default=False
        ),
    ] = None
    seed: Annotated[int | None, Parameter(help="of simulated arrivals; 0", show_default=False)] = (
        None
    )


@Parameter(name="*", group=_OUTPUT)
@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """How the answer is given."""

    json: Json = False
    plot: Annotated[
        str | None, Parameter(help="file that a picture is written to (SVG)", show_default=False)
    ] = None
