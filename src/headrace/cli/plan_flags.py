"""The flags of `headrace plan`, and what they mean as a cost model and a workload."""

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from cyclopts import Group, Parameter

from headrace.core.base.errors import ConfigError
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import BYTES_BY_DTYPE, Layout, ModelShape
from headrace.core.workload.profiles import CHAT, WorkloadProfile, profile_named
from headrace.plan.engines import Engine
from headrace.plan.presets import find, presets_with
from headrace.plan.reference import REFERENCE_70B_H100

_TARGET = Group("What runs", sort_key=4)
_WORKLOAD = Group("Workload", sort_key=5)
_OUTPUT = Group("Output", sort_key=6)

DEFAULT_MODEL: Final = "meta-llama/Meta-Llama-3.1-8B"
DEFAULT_GPU: Final = "H100 SXM"
MAX_TOKENS: Final = 100_000_000
MAX_SEQS: Final = 1_000_000
MAX_GPUS: Final = 65_536


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

    def profile(self, usual: WorkloadProfile = CHAT) -> WorkloadProfile:
        """The named workload, else the usual one, with the lengths that were given."""
        profile = usual if self.workload is None else profile_named(self.workload)
        prompt = profile.prompt_tokens if self.prompt is None else self.prompt
        output = profile.output_tokens if self.output is None else self.output
        check_range("--prompt", prompt, 1, MAX_TOKENS)
        check_range("--output", output, 1, MAX_TOKENS)
        return msgspec.structs.replace(profile, prompt_tokens=prompt, output_tokens=output)


@Parameter(name="*", group=_OUTPUT)
@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """How the answer is given."""

    json: Annotated[
        bool, Parameter(help="print figures as JSON", negative="", show_default=False)
    ] = False
    plot: Annotated[
        str | None, Parameter(help="file that a picture is written to (SVG)", show_default=False)
    ] = None


def engine_and_cost(
    target: TargetFlags, layout: LayoutFlags | None = None
) -> tuple[Engine, DataSheetCostModel]:
    """Raises ConfigError for what does not exist or cannot be."""
    presets = presets_with(target.presets)
    engine = Engine.named(target.engine)
    model = presets.model(target.model)
    cost = DataSheetCostModel(
        model=model,
        accelerator=presets.accelerator(target.gpu),
        layout=_layout(layout or LayoutFlags(), model),
        weight_dtype=check_dtype("--weights", target.weights),
        kv_dtype=check_dtype("--kv-dtype", target.kv_dtype or engine.kv_dtype(target.weights)),
        efficiency=engine.efficiency,
    )
    if not cost.has_links():
        raise ConfigError(
            f"{cost.accelerator.name} has no link that {cost.layout} needs",
            hint=f"stay within {cost.accelerator.scaleup_gpus} devices, or give it a link",
        )
    return engine, cost


def _layout(flags: LayoutFlags, model: ModelShape) -> Layout:
    layout = Layout(tp=flags.tp, pp=flags.pp, ep=flags.ep, dp=flags.dp)
    for name, size in msgspec.structs.asdict(layout).items():
        check_range(f"--{name}", size, 1, MAX_GPUS)
    if fault := model.layout_fault(layout):
        raise ConfigError(
            f"{model.name} cannot be laid out so: {fault}",
            hint="`headrace plan parallel --gpus N` lists every layout that can be",
        )
    return layout


def check_range(name: str, value: float, low: float, high: float) -> float:
    """Raises ConfigError outside `low` to `high`, and for what is no number."""
    if not low <= value <= high:
        limits = f"from {low:g} to {high:g}"
        raise ConfigError(f"{name} is {value:g}", hint=f"{name} takes {limits}")
    return value


def check_dtype(name: str, dtype: str) -> str:
    if dtype not in BYTES_BY_DTYPE:
        raise ConfigError(f"{name} is {dtype!r}", hint="known: " + ", ".join(BYTES_BY_DTYPE))
    return dtype


def reference_cost(
    preset: str, target: TargetFlags | None, layout: LayoutFlags | None = None
) -> DataSheetCostModel:
    """The constants of a preset, which flags of what runs would contradict."""
    cost = find("preset", preset, {"reference-70b-h100": REFERENCE_70B_H100})
    if target is not None or layout is not None:
        raise ConfigError(
            f"--preset {preset} says what runs already", hint="leave out the flags of what runs"
        )
    return cost
