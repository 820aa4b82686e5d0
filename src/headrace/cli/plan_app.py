"""`headrace plan`: its questions, what they take, and their help."""

from typing import Annotated

from cyclopts import App, Parameter

from headrace.cli.plan_flags import (
    AnswerFlags,
    LayoutFlags,
    SimulatorFlags,
    TargetFlags,
    WorkloadFlags,
)
from headrace.cli.plan_fleet_flags import (
    CountedFlags,
    PolicyFlags,
    SearchFlags,
    TrafficFlags,
    WorkerFlags,
)

plan = App(name="plan", help="Answer capacity questions: before there is a device to ask.")

Preset = Annotated[
    str | None,
    Parameter(
        name="--preset",
        help="fixed constants instead of these flags; a wrong name lists all",
        show_default=False,
    ),
]

Gpus = Annotated[
    int | None,
    Parameter(help="devices; none = 12, or as many as were calibrated", show_default=False),
]
Cost = Annotated[
    str | None,
    Parameter(
        help="file of `headrace calibrate`, whose workers are the devices", show_default=False
    ),
]
DesignBatch = Annotated[
    int | None,
    Parameter(
        help="decode batch that workers are designed for; none = 128, or what was calibrated",
        show_default=False,
    ),
]


@plan.command
def roofline(
    *,
    preset: Preset = None,
    batch: Annotated[
        int | None, Parameter(help="sequences in the batch; none = 8", show_default=False)
    ] = None,
    target: TargetFlags | None = None,
    layout: LayoutFlags | None = None,
    workload: WorkloadFlags | None = None,
    answer: AnswerFlags | None = None,
) -> int:
    """Say which resource is the wall for prefill and decode, and what TTFT, TPOT and E2E follow."""
    from headrace.cli.plan_roofline import roofline as command

    return command(preset, batch, target, layout, workload, answer or AnswerFlags())


@plan.command
def goodput(
    *,
    preset: Preset = None,
    load: Annotated[
        float | None,
        Parameter(
            help="requests per second; none = half of what all workers can", show_default=False
        ),
    ] = None,
    gpus: Gpus = None,
    cost: Cost = None,
    ttft_ms: Annotated[
        float | None, Parameter(help="limit; none = the workload's", show_default=False)
    ] = None,
    tpot_ms: Annotated[
        float | None, Parameter(help="limit; none = the workload's", show_default=False)
    ] = None,
    chunk: Annotated[int, Parameter(help="tokens of a step with chunks of prompts")] = 512,
    design_batch: DesignBatch = None,
    kv_link_gb_s: Annotated[
        float | None,
        Parameter(help="GB/s that hand off KV; none = takes no time", show_default=False),
    ] = None,
    page_model: Annotated[
        bool, Parameter(help="the teaching page's model too", negative="", show_default=False)
    ] = False,
    simulator: SimulatorFlags | None = None,
    target: TargetFlags | None = None,
    layout: LayoutFlags | None = None,
    workload: WorkloadFlags | None = None,
    answer: AnswerFlags | None = None,
) -> int:
    """Compare co-located, chunked and disaggregated serving: the load that keeps the limits."""
    from headrace.cli.plan_goodput import GoodputAsked
    from headrace.cli.plan_goodput import goodput as command

    asked = GoodputAsked(
        preset=preset,
        load_per_s=load,
        num_gpus=gpus,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        chunk_tokens=chunk,
        design_batch_seqs=design_batch,
        kv_link_gb_per_s=kv_link_gb_s,
        calibration=cost,
        with_page=page_model or preset is not None,
        simulator=simulator or SimulatorFlags(),
    )
    return command(asked, target, layout, workload, answer or AnswerFlags())


@plan.command
def claims(
    names: Annotated[
        tuple[str, ...],
        Parameter(help="which; none = all, those of traces where --trace is", negative=""),
    ] = (),
    /,
    *,
    trace: Annotated[
        str | None, Parameter(help="Mooncake's conversation trace", show_default=False)
    ] = None,
    requests: Annotated[int, Parameter(help="of each run")] = 200,
    seed: Annotated[int, Parameter(help="of lengths and arrivals")] = 0,
    answer: AnswerFlags | None = None,
) -> int:
    """Hold what the field claims of batching, disaggregation and routing against the simulator.

    batching, distserve, splitwise, routing; with a trace also mooncake and hits.
    """
    from headrace.cli.plan_claims import claims as command

    return command(names, trace, requests, seed, answer or AnswerFlags())


@plan.command
def fleet(
    *,
    traffic: TrafficFlags | None = None,
    search: SearchFlags | None = None,
    worker: WorkerFlags | None = None,
    answer: AnswerFlags | None = None,
) -> int:
    """Search for the cheapest fleet that holds the limits, by simulation.

    Accelerators, tensor parallel ranks, the split of prefill and decode, how many workers, and the
    router's policy. The exit code is 1 where nothing that was tried holds.
    """
    from headrace.cli.plan_fleet import fleet as command

    return command(
        traffic or TrafficFlags(),
        search or SearchFlags(),
        worker or WorkerFlags(),
        answer or AnswerFlags(),
    )


@plan.command
def kv(
    *,
    preset: Preset = None,
    length: Annotated[
        tuple[int, ...],
        Parameter(
            help="tokens of a request; may be repeated; none = 1024 to 131072",
            negative="",
            show_default=False,
        ),
    ] = (),
    target: TargetFlags | None = None,
    layout: LayoutFlags | None = None,
    answer: AnswerFlags | None = None,
) -> int:
    """Say what keys and values weigh, and how many requests fit beside the weights.

    Without a layout: one device, and tensor parallel ranks up to the domain of fast links.
    """
    from headrace.cli.plan_layouts import kv as command

    return command(preset, length, target, layout, answer or AnswerFlags())


@plan.command
def parallel(
    *,
    gpus: Annotated[int, Parameter(help="devices, all of which are used")] = 8,
    concurrency: Annotated[int, Parameter(help="requests under way at once")] = 64,
    target: TargetFlags | None = None,
    workload: WorkloadFlags | None = None,
    answer: AnswerFlags | None = None,
) -> int:
    """Compare every layout that fits: TP, PP, EP, DP, their links, TTFT, TPOT and throughput."""
    from headrace.cli.plan_layouts import parallel as command

    return command(gpus, concurrency, target, workload, answer or AnswerFlags())


@plan.command
def routing(
    *,
    preset: Preset = None,
    simulate: Annotated[
        bool,
        Parameter(
            help="ask the production router's policies, under the simulator's clock",
            negative="",
            show_default=False,
        ),
    ] = False,
    workers: Annotated[
        int | None,
        Parameter(help="none = 4, or as many as were calibrated", show_default=False),
    ] = None,
    counted: CountedFlags | None = None,
    simulated: PolicyFlags | None = None,
    traffic: TrafficFlags | None = None,
    worker: WorkerFlags | None = None,
    answer: AnswerFlags | None = None,
) -> int:
    """Compare routing policies on a trace or a workload: hits, latencies, goodput, loads.

    Without --simulate three policies of a teaching page are counted, without a clock.
    """
    answer = answer or AnswerFlags()
    if simulate:
        from headrace.cli.plan_policies import policies

        return policies(
            workers,
            (preset, counted),
            simulated or PolicyFlags(),
            traffic or TrafficFlags(),
            worker or WorkerFlags(),
            answer,
        )
    from headrace.cli.plan_routing import routing as command

    return command(preset, workers, counted, traffic, simulated or worker, answer)
