"""`headrace bench`: its parts, what they take, and their help."""

from typing import Annotated

from cyclopts import App, Parameter

from headrace.cli.bench_flags import LoadFlags, OutputFlags
from headrace.cli.bench_serve_flags import JudgeFlags, ReportFlags, ServerFlags, TrafficFlags
from headrace.cli.flags import Json, Model

bench = App(
    name="bench",
    help="Measure: servers, kernels, loads, steps, routing, gateways, front ends, installations.",
)

Urls = Annotated[
    tuple[str, ...],
    Parameter(name="--url", negative="", show_default=False, help="server; may be repeated"),
]

BASELINE = "tests/bench/baseline.json"
BaselineFile = Annotated[str, Parameter(help="JSON file")]
Ratios = Annotated[
    bool, Parameter(help="measure ratios of times too, for which the machine should be quiet")
]
Seconds = Annotated[float, Parameter(help="time for all measurements together")]


@bench.command
def kernels(
    model: Model = None,
    *,
    threads: Annotated[int, Parameter(help="threads that compute; 0 = one for each core")] = 0,
    isa: Annotated[str, Parameter(help="instruction set: auto, or one that doctor lists")] = "auto",
    seconds: Seconds = 30.0,
    output: OutputFlags | None = None,
) -> int:
    """Time the steps and operations of a model, beside what this machine could do at most.

    The limits (reading memory, products in registers) are measured first, on the spot. A share is
    the time that the binding limit would allow, by the time that was taken.
    """
    from headrace.cli.bench import bench_kernels

    return bench_kernels(
        model, threads=threads, isa=isa, seconds=seconds, output=output or OutputFlags()
    )


@bench.command
def load(
    *,
    url: Urls = (),
    loads: LoadFlags | None = None,
    output: OutputFlags | None = None,
) -> int:
    """Offer the standard loads to a server of the OpenAI completions endpoint.

    With several servers each load goes to one after the other, in several rounds, and figures are
    compared with those of the first.
    """
    from headrace.cli.bench import bench_load

    return bench_load(url, loads or LoadFlags(), output or OutputFlags())


@bench.command
def serve(
    *,
    url: Annotated[str, Parameter(help="the server's address", show_default=False)] = "",
    server: ServerFlags | None = None,
    traffic: TrafficFlags | None = None,
    judged: JudgeFlags | None = None,
    output: ReportFlags | None = None,
) -> int:
    """Offer realistic traffic to any OpenAI-compatible server, and say what it was good for.

    Requests come at times of their own (--rate, --ramp, a trace), from clients who wait for their
    answers (--concurrency), or all at once (--burst). --search finds the highest load that keeps
    the limits. Exit code 1: the figures are no measurement, and it is said why.
    """
    from headrace.cli.bench_serve import bench_serve

    return bench_serve(
        url,
        server or ServerFlags(),
        traffic or TrafficFlags(),
        judged or JudgeFlags(),
        output or ReportFlags(),
    )


@bench.command
def scheduler(*, output: OutputFlags | None = None) -> int:
    """Measure the host's part of a step, without a device."""
    from headrace.cli.bench import bench_scheduler

    return bench_scheduler(output or OutputFlags())


@bench.command
def router(
    *,
    workers: Annotated[int, Parameter(help="workers to choose among")] = 256,
    replicas: Annotated[int, Parameter(help="blocks that the workers hold together")] = 10_000_000,
    decisions: Annotated[int, Parameter(help="prompts to decide on, three times each")] = 1000,
    output: OutputFlags | None = None,
) -> int:
    """Measure what a routing decision costs, and in the simulator what each policy is worth.

    Ten million replicas take about 1 GiB of memory and a minute.
    """
    from headrace.cli.bench import bench_router

    return bench_router(workers, replicas, decisions, output or OutputFlags())


@bench.command
def gateway(
    *,
    streams: Annotated[int, Parameter(help="streams at the same time")] = 200,
    rounds: Annotated[int, Parameter(help="turns that each way has")] = 2,
    output: OutputFlags | None = None,
) -> int:
    """Measure what `serve --engine` adds to the time that requests and events take.

    It goes through a gateway of its own, in front of engines that compute nothing, and straight to
    them, in turns.
    """
    from headrace.cli.bench import bench_gateway

    return bench_gateway(streams, rounds, output or OutputFlags())


@bench.command
def front(
    *,
    workers: Annotated[int, Parameter(help="workers of the front end")] = 4,
    streams: Annotated[int, Parameter(help="streams at the same time")] = 200,
    rounds: Annotated[int, Parameter(help="turns that each way has")] = 2,
    output: OutputFlags | None = None,
) -> int:
    """Measure what `serve --workers` adds to the time that requests and events take.

    It goes through a front end of its own, and to a server of one process, in turns. Both are over
    engines that compute nothing, with the default model's text.
    """
    from headrace.cli.bench import bench_front

    return bench_front(workers, streams, rounds, output or OutputFlags())


@bench.command
def transfer(*, output: OutputFlags | None = None) -> int:
    """Measure how fast KV moves between workers, beside what memory and a bare socket allow.

    It takes 512 MiB of memory and a few seconds.
    """
    from headrace.cli.bench import bench_transfer

    return bench_transfer(output or OutputFlags())


@bench.command
def precision(
    model: Model = None,
    *,
    text: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="file to score; may be repeated; none = those of the checkout in this folder",
        ),
    ] = (),
    output: OutputFlags | None = None,
) -> int:
    """Measure the perplexity under each type of activations and of keys and values."""
    from headrace.cli.bench import bench_precision

    return bench_precision(model, text, output or OutputFlags())


@bench.command
def install(*, output: OutputFlags | None = None) -> int:
    """Install the checkout in this folder without extras, and measure time and size."""
    from headrace.cli.bench import bench_install

    return bench_install(output or OutputFlags())


@bench.command(name="all")
def everything(
    *,
    serve: Annotated[
        str, Parameter(help="arguments for `headrace serve`", show_default=False)
    ] = "",
    against: Annotated[
        tuple[str, ...],
        Parameter(
            name="--against",
            negative="",
            show_default=False,
            help="another server, loaded in turn; may be repeated",
        ),
    ] = (),
    loads: LoadFlags | None = None,
    output: OutputFlags | None = None,
) -> int:
    """Start headrace, offer every load, and measure a scheduler step."""
    from headrace.cli.bench import bench_all

    return bench_all(loads or LoadFlags(), serve, against, output or OutputFlags())


@bench.command
def baseline(
    file: BaselineFile = BASELINE, /, *, ratios: Ratios = True, seconds: Seconds = 30.0
) -> int:
    """Count the instructions of fixed work, measure ratios, and write both to a file.

    Machine instructions are counted where valgrind is installed.
    """
    from headrace.cli.bench_baseline import write

    return write(file, with_ratios=ratios, seconds=seconds)


@bench.command
def compare(
    file: BaselineFile = BASELINE,
    /,
    *,
    ratios: Ratios = True,
    seconds: Seconds = 30.0,
    json: Json = False,
) -> int:
    """Measure what a baseline holds and print what moved; exit code 1 if something did.

    Counts may move by 5 %, ratios by 25 %. What depends on another compiler, Python or machine is
    not compared.
    """
    from headrace.cli.bench_baseline import compare as command

    return command(file, with_ratios=ratios, seconds=seconds, as_json=json)
