"""The flags of `headrace sim`. None = what the file says, or else the default of SimAsked."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

_REQUESTS = Group("Requests", sort_key=1)
_WORKERS = Group("Workers", sort_key=2)
_SCALED = Group("Autoscaler", sort_key=3)
_JUDGED = Group("Limits and faults", sort_key=4)


def _flag(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=text, show_default=False)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimFlags:
    """What is simulated."""

    workload: Annotated[str | None, _flag(_REQUESTS, "chat (the default), agent or rag")] = None
    trace: Annotated[
        str | None,
        _flag(
            _REQUESTS, "file of a trace (Mooncake, Bailian, Azure, BurstGPT, OpenTelemetry) instead"
        ),
    ] = None
    speed: Annotated[
        float | None, _flag(_REQUESTS, "of the trace; 2 = all comes in half the time")
    ] = None
    requests: Annotated[int | None, _flag(_REQUESTS, "how many; 1000, or all of a trace")] = None
    load: Annotated[
        float | None,
        _flag(_REQUESTS, "requests per second; none = half of what the workers can"),
    ] = None
    concurrency: Annotated[
        int | None, _flag(_REQUESTS, "clients who each ask again when they are answered, instead")
    ] = None
    burstiness: Annotated[
        float | None, _flag(_REQUESTS, "squared variation of gaps; 1 = Poisson, 0 = even")
    ] = None
    prompt: Annotated[int | None, _flag(_REQUESTS, "mean prompt tokens")] = None
    output: Annotated[int | None, _flag(_REQUESTS, "mean output tokens")] = None
    spread: Annotated[
        float | None,
        _flag(
            _REQUESTS,
            "standard deviation of lengths over their means, 0 = all alike; 0.6 of prompts, 1.0 of"
            " outputs",
        ),
    ] = None
    shared: Annotated[
        float | None, _flag(_REQUESTS, "share of a prompt that others begin with, too")
    ] = None
    warm_up_s: Annotated[
        float | None, _flag(_REQUESTS, "seconds whose arrivals are not counted; 0")
    ] = None
    seed: Annotated[int | None, _flag(_REQUESTS, "of everything that is left to chance; 0")] = None

    mixed: Annotated[int | None, _flag(_WORKERS, "workers that prefill and decode; 4")] = None
    prefill: Annotated[int | None, _flag(_WORKERS, "workers that hand prompts on; 0")] = None
    decode: Annotated[int | None, _flag(_WORKERS, "workers that only decode; 0")] = None
    model: Annotated[str | None, _flag(_WORKERS, "model of the tables, or of --presets")] = None
    gpu: Annotated[str | None, _flag(_WORKERS, "accelerator, likewise")] = None
    weights: Annotated[str | None, _flag(_WORKERS, "type of the weights; bf16")] = None
    kv_dtype: Annotated[str | None, _flag(_WORKERS, "type of keys and values")] = None
    engine: Annotated[
        str | None, _flag(_WORKERS, "ideal (the data sheet), or an engine that was fitted; vllm")
    ] = None
    tp: Annotated[int | None, _flag(_WORKERS, "devices of a worker; 1")] = None
    presets: Annotated[str | None, _flag(_WORKERS, "TOML file with more models and GPUs")] = None
    steps: Annotated[
        str | None,
        _flag(_WORKERS, "event log of an engine, whose steps and memory stand for the device"),
    ] = None
    cost: Annotated[
        str | None, _flag(_WORKERS, "file of `headrace calibrate`, whose machine is the device")
    ] = None
    sharing: Annotated[
        int | None, _flag(_WORKERS, "workers that share a calibrated machine; as it was calibrated")
    ] = None
    step_tokens: Annotated[
        int | None, _flag(_WORKERS, "most tokens of a step; 2048, or as calibrated")
    ] = None
    block_size: Annotated[int | None, _flag(_WORKERS, "tokens of a KV block; 16")] = None
    policy: Annotated[str | None, _flag(_WORKERS, "of the router; kv")] = None
    handoff: Annotated[str | None, _flag(_WORKERS, "auto (the default), always or never")] = None
    kv_link_gb_s: Annotated[float | None, _flag(_WORKERS, "GB/s of a worker's link for KV; 50")] = (
        None
    )

    autoscale: Annotated[
        bool | None,
        _flag(_SCALED, "start and end workers, and change their roles, as `serve --autoscale`"),
    ] = None
    min_workers: Annotated[int | None, _flag(_SCALED, "fewest of a pool; 1")] = None
    max_workers: Annotated[
        int | None, _flag(_SCALED, "most of all pools together; as many as at the begin")
    ] = None
    role_cooldown_s: Annotated[
        float | None, _flag(_SCALED, "seconds between changes of roles; 120")
    ] = None

    ttft_ms: Annotated[float | None, _flag(_JUDGED, "limit; none = the workload's")] = None
    tpot_ms: Annotated[float | None, _flag(_JUDGED, "limit; likewise")] = None
    itl_ms: Annotated[float | None, _flag(_JUDGED, "limit of every gap")] = None
    e2e_ms: Annotated[float | None, _flag(_JUDGED, "limit; none = the workload's")] = None
    mean_life_s: Annotated[
        float | None, _flag(_JUDGED, "after which a worker dies, on average; 0 = never")
    ] = None
    start_up_s: Annotated[
        float | None, _flag(_JUDGED, "until one that died or was asked for serves; 30")
    ] = None
