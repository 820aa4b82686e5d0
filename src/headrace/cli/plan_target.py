"""What the flags of `headrace plan` mean: a cost model, an engine, a workload, or a refusal."""

from typing import Final

import msgspec

from headrace.cli.plan_flags import LayoutFlags, TargetFlags, WorkloadFlags
from headrace.core.base.errors import ConfigError
from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import BYTES_BY_DTYPE, Layout, ModelShape
from headrace.core.workload.profiles import CHAT, WorkloadProfile, profile_named
from headrace.plan.engines import Engine
from headrace.plan.presets import find, presets_with
from headrace.plan.reference import REFERENCE_70B_H100

MAX_TOKENS: Final = 100_000_000
MAX_SEQS: Final = 1_000_000
MAX_GPUS: Final = 65_536


def profile_of(flags: WorkloadFlags | None, usual: WorkloadProfile = CHAT) -> WorkloadProfile:
    """The named workload, else the usual one, with the lengths that were given."""
    if flags is None:
        return usual
    profile = usual if flags.workload is None else profile_named(flags.workload)
    prompt = profile.prompt_tokens if flags.prompt is None else flags.prompt
    output = profile.output_tokens if flags.output is None else flags.output
    check_range("--prompt", prompt, 1, MAX_TOKENS)
    check_range("--output", output, 1, MAX_TOKENS)
    return msgspec.structs.replace(profile, prompt_tokens=prompt, output_tokens=output)


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
        limits = f"from {low:.12g} to {high:.12g}"
        raise ConfigError(f"{name} is {value:.12g}", hint=f"{name} takes {limits}")
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
