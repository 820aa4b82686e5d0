"""The flags of `headrace plan fleet` and of `plan routing` under the simulator's clock."""

from dataclasses import dataclass
from typing import Annotated, Final

from cyclopts import Group, Parameter

from headrace.cli.plan_flags import DEFAULT_MODEL

_REQUESTS = Group("Requests", sort_key=1)
_LIMITS = Group("Limits", sort_key=2)
_SEARCH = Group("What is searched", sort_key=3)
_EFFORT = Group("Effort", sort_key=4)
_RUNS = Group("What runs", sort_key=5)

DEFAULT_GPUS: Final = ("H100 SXM", "H200 SXM", "A100 SXM 80GB")
POLICIES: Final = (
    "kv",
    "prefix",
    "session",
    "least_loaded",
    "power_of_two",
    "round_robin",
    "random",
)


def _flag(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=text, show_default=False)


def _listed(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=f"{text}; may be repeated", negative="", show_default=False)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrafficFlags:
    """What comes, and what it may take."""

    workload: Annotated[str, Parameter(group=_REQUESTS, help="chat, agent or rag")] = "chat"
    trace: Annotated[
        str | None,
        _flag(_REQUESTS, "file of a published trace (Mooncake, Bailian, Azure, BurstGPT) instead"),
    ] = None
    speed: Annotated[
        float, Parameter(group=_REQUESTS, help="of the trace; 2 = all comes in half the time")
    ] = 1.0
    load: Annotated[
        float | None, _flag(_REQUESTS, "requests per second; none = 10, or the trace's")
    ] = None
    requests: Annotated[
        int, Parameter(group=_REQUESTS, help="that are counted, about, in each run")
    ] = 400
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
    price: Annotated[
        tuple[str, ...], _listed(_SEARCH, "GPU=USD an hour, instead of the table's")
    ] = ()
    tp: Annotated[
        tuple[int, ...], _listed(_SEARCH, "tensor parallel ranks of a worker; none = 1, 2, 4, 8")
    ] = ()
    split: Annotated[
        tuple[str, ...],
        _listed(_SEARCH, "chunked, prefill-first or disaggregated; none = all of them"),
    ] = ()
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
    step_tokens: Annotated[int, Parameter(group=_RUNS, help="most tokens of a step")] = 2048
    block_size: Annotated[int, Parameter(group=_RUNS, help="tokens of a KV block")] = 16
    kv_link_gb_s: Annotated[
        float | None, _flag(_RUNS, "GB/s of a worker's link for KV; none = its data sheet's")
    ] = None
    seed: Annotated[int, Parameter(group=_EFFORT, help="of everything that is left to chance")] = 0
