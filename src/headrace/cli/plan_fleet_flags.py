"""The flags of `headrace plan fleet` and of `plan routing` under the simulator's clock."""

from dataclasses import dataclass
from typing import Annotated, Final

from cyclopts import Group, Parameter

from headrace.cli.plan_flags import DEFAULT_MODEL
from headrace.core.config.schema import RouterConfig

_REQUESTS = Group("Requests", sort_key=1)
_LIMITS = Group("Limits", sort_key=2)
_SEARCH = Group("What is searched", sort_key=3)
_EFFORT = Group("Effort", sort_key=4)
_RUNS = Group("What runs", sort_key=5)

DEFAULT_GPUS: Final = ("H100 SXM", "H200 SXM", "A100 SXM 80GB")
POLICIES: Final[tuple[str, ...]] = RouterConfig.__dataclass_fields__["policy"].metadata["choices"]


def _flag(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=text, show_default=False)


def _listed(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=f"{text}; may be repeated", negative="", show_default=False)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrafficFlags:
    """What comes, and what it may take."""

    workload: Annotated[
        str | None, _flag(_REQUESTS, "chat (the default), agent or rag; of a trace its limits")
    ] = None
    trace: Annotated[
        str | None,
        _flag(_REQUESTS, "file of a published trace (Mooncake, Bailian, Azure, BurstGPT) instead"),
    ] = None
    speed: Annotated[
        float | None, _flag(_REQUESTS, "of the trace; 2 = all comes in half the time")
    ] = None
    load: Annotated[
        float | None,
        _flag(
            _REQUESTS,
            "requests per second; none = 10, or 70 % of what `plan routing` has workers for",
        ),
    ] = None
    requests: Annotated[
        int | None,
        _flag(
            _REQUESTS, "that are counted in each run, about, or the first of a trace; none = 400"
        ),
    ] = None
    prompt: Annotated[int | None, _flag(_REQUESTS, "mean prompt tokens")] = None
    output: Annotated[int | None, _flag(_REQUESTS, "mean output tokens")] = None

    ttft_ms: Annotated[float | None, _flag(_LIMITS, "none = the workload's")] = None
    tpot_ms: Annotated[float | None, _flag(_LIMITS, "likewise")] = None
    itl_ms: Annotated[float | None, _flag(_LIMITS, "of every gap between tokens")] = None
    e2e_ms: Annotated[float | None, _flag(_LIMITS, "none = the workload's")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """Which fleets there may be."""

    attainment: Annotated[
        float, Parameter(group=_LIMITS, help="share of requests that must keep every limit")
    ] = 0.95
    gpu: Annotated[
        tuple[str, ...],
        _listed(_SEARCH, f"accelerator; none = {', '.join(DEFAULT_GPUS)}"),
    ] = ()
    cost: Annotated[
        tuple[str, ...],
        _listed(
            _SEARCH,
            "file of `headrace calibrate`, whose machine is searched instead of accelerators; its"
            " name is the file's",
        ),
    ] = ()
    price: Annotated[
        tuple[str, ...],
        _listed(_SEARCH, "GPU=USD an hour, instead of the table's; of a machine, its only one"),
    ] = ()
    tp: Annotated[
        tuple[int, ...], _listed(_SEARCH, "tensor parallel ranks of a worker; none = 1, 2, 4, 8")
    ] = ()
    pp: Annotated[tuple[int, ...], _listed(_SEARCH, "pipeline stages of a worker; none = 1")] = ()
    ep: Annotated[
        tuple[int, ...],
        _listed(_SEARCH, "ranks of a worker that share whole experts; 1, or none = sliced ones"),
    ] = ()
    split: Annotated[
        tuple[str, ...],
        _listed(_SEARCH, "chunked, prefill-first or disaggregated; none = all of them"),
    ] = ()
    pairs: Annotated[
        int,
        Parameter(
            group=_SEARCH,
            help="fleets looked at whose prompts have other workers than answers, 0 = none",
        ),
    ] = 4
    policy: Annotated[
        tuple[str, ...],
        _listed(
            _SEARCH, "of the router, the first for the search; none = kv, least_loaded, round_robin"
        ),
    ] = ()
    max_gpus: Annotated[int, Parameter(group=_SEARCH, help="devices of a fleet")] = 64
    seeds: Annotated[int, Parameter(group=_EFFORT, help="runs of each fleet that is measured")] = 3
    time_budget_s: Annotated[
        float, Parameter(group=_EFFORT, help="seconds after which no run begins any more")
    ] = 110.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WorkerFlags:
    """What a worker is."""

    model: Annotated[str, Parameter(group=_RUNS, help="model of the tables, or of --presets")] = (
        DEFAULT_MODEL
    )
    weights: Annotated[str, Parameter(group=_RUNS, help="type of the weights")] = "bf16"
    kv_dtype: Annotated[
        str | None, _flag(_RUNS, "type of keys and values; none = the engine's, else bf16")
    ] = None
    engine: Annotated[
        str, Parameter(group=_RUNS, help="ideal (the data sheet), or an engine that was fitted")
    ] = "vllm"
    presets: Annotated[str | None, _flag(_RUNS, "TOML file with more models and GPUs")] = None
    step_tokens: Annotated[
        int | None, _flag(_RUNS, "most tokens of a step; none = 2048, or as calibrated")
    ] = None
    block_size: Annotated[int, Parameter(group=_RUNS, help="tokens of a KV block")] = 16
    kv_link_gb_s: Annotated[
        float | None, _flag(_RUNS, "GB/s of a worker's link for KV; none = its data sheet's")
    ] = None
    seed: Annotated[int, Parameter(group=_EFFORT, help="of everything that is left to chance")] = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PolicyFlags:
    """What `plan routing --simulate` compares, on what."""

    policy: Annotated[
        tuple[str, ...], _listed(_SEARCH, "policy of the router; none = all of them")
    ] = ()
    gpu: Annotated[str | None, _flag(_RUNS, f"accelerator; none = {DEFAULT_GPUS[0]}")] = None
    tp: Annotated[int | None, _flag(_RUNS, "devices of a worker; none = 1")] = None
    cost: Annotated[
        str | None, _flag(_RUNS, "file of `headrace calibrate`, whose workers these are")
    ] = None
    seeds: Annotated[int, Parameter(group=_EFFORT, help="runs of each policy")] = 3


@Parameter(name="*", group=Group("Only counted", sort_key=6))
@dataclass(frozen=True, kw_only=True)
class CountedFlags:
    """What the page's policies go by."""

    ratio: Annotated[
        float | None,
        Parameter(help="share of alike requests, and of their prompts", show_default=False),
    ] = None
    kv_weight: Annotated[
        float, Parameter(help="requests that a whole uncached prompt counts as")
    ] = 3.0
    hold_s: Annotated[
        float | None,
        Parameter(
            help="seconds that a request counts as load; none = for ever", show_default=False
        ),
    ] = None
    prefill_tokens_per_s: Annotated[float, Parameter(help="of one worker")] = 50_000.0
