"""`headrace bench serve`: traffic for any OpenAI-compatible server, and what it was good for."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import uvloop

from headrace.bench.machine import machine
from headrace.bench.serve.asked import Rules, Traffic
from headrace.bench.serve.discovery import find_model, probe
from headrace.bench.serve.outcome import Outcome
from headrace.bench.serve.page import page_of
from headrace.bench.serve.report import Report
from headrace.bench.serve.results import ServeResults, requests_csv
from headrace.bench.serve.run import CONCURRENCY, Bench, SearchReport
from headrace.bench.serve.source import fitting
from headrace.bench.serve.tables import tables_of
from headrace.bench.serve.wording import Wording
from headrace.cli.bench_serve_asked import rules_of, start_of, target_of, traffic_of, words_of
from headrace.cli.bench_serve_flags import JudgeFlags, ReportFlags, ServerFlags, TrafficFlags
from headrace.cli.bench_serve_progress import showing_runs
from headrace.cli.output import print_json, print_table, report_note
from headrace.core.base.errors import ConfigError
from headrace.core.workload.profiles import importance_words
from headrace.models import files

MAX_TOKENS = 1 << 17  # of a request, where neither server nor flag says
ENDING = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
TEMPLATE_TOKENS = 64  # that a chat's template may add to a prompt


@dataclass(frozen=True)
class _Found:
    model: str
    num_left_out: int
    report: Report | None
    search: SearchReport | None
    outcomes: Sequence[Outcome]
    stopped_by: signal.Signals | None = None


def bench_serve(
    url: str, server: ServerFlags, flags: TrafficFlags, judged: JudgeFlags, output: ReportFlags
) -> int:
    check_writable(output)
    target = target_of(url, server)
    traffic, rules = traffic_of(flags, judged), rules_of(flags, judged)
    words = words_of(server.tokenizer)
    metrics_url = server.metrics or f"{target.url}/metrics"

    async def measure() -> _Found:
        found = await find_model(target)
        most = flags.max_length or (found.max_model_len or MAX_TOKENS) - TEMPLATE_TOKENS
        fitted = fitted_to(traffic, most)
        asked = msgspec.structs.replace(target, model=found.id)
        await probe(asked, Wording(words))
        with showing_runs(shows_total=traffic.duration_s is None) as on_progress:
            bench = Bench(asked, rules, words, metrics_url, on_progress)
            with _ending_early(bench) as heard:
                measured = await _measure(bench, fitted, judged, start_of(flags, judged), traffic)
            return replace(measured, stopped_by=heard[0] if heard else None)

    found = uvloop.run(measure())
    results = ServeResults(
        machine=machine(),
        url=target.url,
        model=found.model,
        endpoint=target.endpoint,
        asked={**asdict(server), "api_key": "", **asdict(flags), **asdict(judged)},
        traffic=words_about(as_held(flags, found.search), traffic),
        seed=traffic.seed,
        num_left_out=found.num_left_out,
        slo=rules.slo,
        importance=importance_words(traffic.profile),
        report=found.report,
        search=found.search,
    )
    code = _give(results, found.outcomes, rules, output)
    return code if found.stopped_by is None else 128 + found.stopped_by


@contextmanager
def _ending_early(bench: Bench) -> Iterator[list[signal.Signals]]:
    """The first signal ends the run, whose figures are shown then; a second one ends the command.
    Yields what was heard.
    """
    loop = asyncio.get_running_loop()
    heard: list[signal.Signals] = []

    def leave(number: signal.Signals) -> None:
        heard.append(number)
        for one in ENDING:
            loop.remove_signal_handler(one)
        bench.stop(ENDING[number])

    for one in ENDING:
        loop.add_signal_handler(one, leave, one)
    try:
        yield heard
    finally:
        for one in ENDING:
            loop.remove_signal_handler(one)


async def _measure(
    bench: Bench, traffic: Traffic, judged: JudgeFlags, start: float, asked: Traffic
) -> _Found:
    search, outcomes = None, None
    report: Report | None
    if judged.search is None:
        report = await bench.measure(traffic)
    else:
        search, report, outcomes = await bench.search(traffic, judged.search, start, judged.trials)
    return _Found(
        model=bench.target.model,
        num_left_out=len(asked.trace) - len(traffic.trace),
        report=report,
        search=search,
        outcomes=bench.outcomes if outcomes is None else outcomes,
    )


def fitted_to(traffic: Traffic, max_tokens: int) -> Traffic:
    """With requests that are no longer than the server takes. Raises ConfigError."""
    if traffic.trace:
        trace = fitting(traffic.trace, max_tokens)
        num = min(traffic.num_requests, len(trace))
        return msgspec.structs.replace(
            traffic, trace=trace, num_requests=num, max_tokens=max_tokens
        )
    profile = traffic.profile
    if profile.prompt_tokens + profile.output_tokens > max_tokens:
        raise ConfigError(
            f"prompts of {profile.prompt_tokens} and answers of {profile.output_tokens} tokens on "
            f"average do not fit {max_tokens} tokens",
            hint="--length-scale 0.1 makes them a tenth as long",
        )
    return msgspec.structs.replace(traffic, max_tokens=max_tokens)


def as_held(flags: TrafficFlags, search: SearchReport | None) -> TrafficFlags:
    """What was offered in the run of a search that is reported."""
    if search is None or search.held is None:
        return flags
    if search.of == CONCURRENCY:
        return replace(flags, concurrency=round(search.held))
    return replace(flags, rate=search.held)


def words_about(flags: TrafficFlags, traffic: Traffic) -> str:
    """What was offered, in words."""
    profile = traffic.profile
    what = (
        f"trace {Path(flags.trace).name}"
        if flags.trace
        else f"{profile.name}, prompts of {profile.prompt_tokens} and answers of "
        f"{profile.output_tokens} tokens on average, "
        f"{profile.turns} {'turn' if profile.turns == 1 else 'turns'}"
    )
    shape = {0.0: "even", 1.0: "Poisson"}.get(flags.burstiness, f"gamma {flags.burstiness:g}")
    if flags.concurrency is not None:
        when = f"{flags.concurrency} clients"
    elif flags.burst:
        when = "all at once"
    elif flags.ramp is not None:
        when = f"{shape}, requests per second {flags.ramp}"
    elif flags.rate is not None:
        when = f"{flags.rate:.4g} requests/s" + ("" if flags.trace else f", {shape}")
    elif flags.trace:
        when = f"{flags.speed:g} times its speed"
    else:
        when = shape
    return f"{what}, {when}"


def _give(
    results: ServeResults, outcomes: Sequence[Outcome], rules: Rules, output: ReportFlags
) -> int:
    """Exit code 1 where the figures are no measurement, or no load held. Files come first: standard
    output may be closed by then.
    """
    if output.out:
        _write(output.out, results.to_json().decode())
    if output.csv:
        _write(output.csv, requests_csv(outcomes, rules))
    if output.html:
        _write(output.html, page_of(results, outcomes, rules))
    if output.json:
        print_json(msgspec.to_builtins(results))
    else:
        for table in tables_of(results):
            print_table(table)
    if results.num_left_out:
        report_note(f"left out: {results.num_left_out} requests longer than the server takes")
    report, search = results.report, results.search
    if report is not None:
        for warning in report.warnings:
            report_note(f"warning: {warning}")
        for kind, detail in report.fault_examples.items():
            report_note(f"failed ({kind}), for example: {' '.join(detail.split())}")
    faults = list(report.faults) if report is not None else []
    if search is not None and search.stopped_by:
        faults.append(f"the search has not come to its end: {search.stopped_by}")
    for fault in faults:
        report_note(f"not a measurement: {fault}")
    return 1 if faults or report is None else 0


def check_writable(output: ReportFlags) -> None:
    """That no run is made whose figures have nowhere to go. Raises ConfigError."""
    for file in filter(None, (output.out, output.csv, output.html)):
        path = Path(file).expanduser()
        with suppress(OSError):  # which is told below
            path.parent.mkdir(parents=True, exist_ok=True)
        files.check_writable(path)


def _write(file: str, text: str) -> None:
    path = Path(file).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    report_note(f"written to {path}")
