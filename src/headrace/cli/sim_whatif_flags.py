"""The flags of `headrace sim run` and `sim whatif`. None = as it was recorded."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

_WORKERS = Group("Otherwise than recorded", sort_key=1)
_MACHINE = Group("What steps take", sort_key=2)
_JUDGED = Group("Limits and figures", sort_key=3)


def _flag(group: Group, text: str) -> Parameter:
    return Parameter(group=group, help=text, show_default=False)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SloFlags:
    """By which requests are judged that stated no limits."""

    slo_ttft_ms: Annotated[float | None, _flag(_JUDGED, "TTFT limit")] = None
    slo_itl_ms: Annotated[float | None, _flag(_JUDGED, "limit of every gap")] = None
    slo_tpot_ms: Annotated[float | None, _flag(_JUDGED, "TPOT limit")] = None
    slo_e2e_ms: Annotated[float | None, _flag(_JUDGED, "E2E limit")] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """What steps take; without these, what the log itself says."""

    cost: Annotated[
        str | None, _flag(_MACHINE, "file of `headrace calibrate`, whose machine serves")
    ] = None
    sharing: Annotated[
        int | None, _flag(_MACHINE, "workers that share such a machine; as it was calibrated")
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WhatIfFlags:
    """What is asked."""

    workers: Annotated[int | None, _flag(_WORKERS, "workers that prefill and decode")] = None
    prefill: Annotated[int | None, _flag(_WORKERS, "workers that hand prompts on")] = None
    decode: Annotated[int | None, _flag(_WORKERS, "workers that only decode")] = None
    policy: Annotated[str | None, _flag(_WORKERS, "of the router")] = None
    handoff: Annotated[str | None, _flag(_WORKERS, "auto, always or never")] = None
    kv_blocks: Annotated[int | None, _flag(_WORKERS, "KV blocks of a worker")] = None
    kv_link_gb_s: Annotated[float | None, _flag(_WORKERS, "GB/s of a worker's link for KV")] = None
    kv_host: Annotated[
        str | None, _flag(_WORKERS, "size of a tier in the host's memory, of each worker, as 64GiB")
    ] = None
    kv_host_gb_s: Annotated[float | None, _flag(_WORKERS, "GB/s to it and from it")] = None
    kv_disk: Annotated[
        str | None, _flag(_WORKERS, "size of a tier on disk below that, as 200GiB")
    ] = None
    kv_disk_gb_s: Annotated[float | None, _flag(_WORKERS, "GB/s to it and from it")] = None
    max_running: Annotated[int | None, _flag(_WORKERS, "most sequences in a step")] = None
    step_tokens: Annotated[int | None, _flag(_WORKERS, "most tokens of a step")] = None
    itl_target_ms: Annotated[float | None, _flag(_WORKERS, "that the `itl` budget keeps")] = None
    order: Annotated[str | None, _flag(_WORKERS, "who is admitted first")] = None
    budget: Annotated[str | None, _flag(_WORKERS, "of a step's tokens: fixed or itl")] = None
    admission: Annotated[str | None, _flag(_WORKERS, "predicted, optimistic or no_evict")] = None
    speed: Annotated[
        float, Parameter(group=_WORKERS, help="2 = all comes in half the time, asked and recorded")
    ] = 1.0

    price: Annotated[
        float | None, _flag(_JUDGED, "$ per worker and hour; none = worker hours are shown")
    ] = None
    seeds: Annotated[
        int, Parameter(group=_JUDGED, help="runs of each, under seeds of their own")
    ] = 1
    seed: Annotated[int, Parameter(group=_JUDGED, help="the first one")] = 0
