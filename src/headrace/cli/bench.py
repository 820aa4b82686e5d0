"""`headrace bench`: how fast it is here, and beside others."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.bench.results import Results, show
from headrace.bench.server import arguments_of
from headrace.bench.suite import (
    LoadsAsked,
    run_all_parts,
    run_front_part,
    run_gateway_part,
    run_install_part,
    run_kernels_part,
    run_load_part,
    run_precision_part,
    run_router_part,
    run_scheduler_part,
    run_transfer_part,
)
from headrace.cli.bench_flags import LoadFlags, OutputFlags
from headrace.cli.output import console, print_json, report_note
from headrace.core.base.errors import ConfigError
from headrace.models.files import check_writable

MAX_SECONDS = 3600


def bench_all(loads: LoadFlags, serve: str, against: Sequence[str], output: OutputFlags) -> int:
    asked, words = _asked(loads), arguments_of(serve)
    return _give(lambda: run_all_parts(asked, words, against, _saver(output)), output)


def bench_load(urls: Sequence[str], loads: LoadFlags, output: OutputFlags) -> int:
    if not urls:
        raise ConfigError("there is no server to load", hint="--url http://127.0.0.1:8000")
    asked = _asked(loads)
    return _give(lambda: run_load_part(asked, urls, _saver(output)), output)


def bench_scheduler(output: OutputFlags) -> int:
    return _give(run_scheduler_part, output)


def bench_router(workers: int, replicas: int, decisions: int, output: OutputFlags) -> int:
    if min(workers, replicas, decisions) < 1:
        raise ConfigError("--workers, --replicas and --decisions must be positive")
    return _give(lambda: run_router_part(workers, replicas, decisions), output)


def bench_gateway(streams: int, rounds: int, output: OutputFlags) -> int:
    if min(streams, rounds) < 1:
        raise ConfigError("--streams and --rounds must be positive")
    return _give(lambda: run_gateway_part(streams, rounds), output)


def bench_front(workers: int, streams: int, rounds: int, output: OutputFlags) -> int:
    if min(workers, streams, rounds) < 1:
        raise ConfigError("--workers, --streams and --rounds must be positive")
    return _give(lambda: run_front_part(workers, streams, rounds), output)


def bench_transfer(output: OutputFlags) -> int:
    return _give(run_transfer_part, output)


def bench_precision(model: str | None, texts: Sequence[str], output: OutputFlags) -> int:
    return _give(lambda: run_precision_part(model or "", texts), output)


def bench_install(output: OutputFlags) -> int:
    return _give(lambda: run_install_part(Path.cwd()), output)


def bench_kernels(
    model: str | None, *, threads: int, isa: str, seconds: float, output: OutputFlags
) -> int:
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(f"--seconds must be positive, and at most {MAX_SECONDS}", seconds=seconds)
    return _give(
        lambda: run_kernels_part(model or "", threads=threads, isa=isa, seconds=seconds), output
    )


def _asked(flags: LoadFlags) -> LoadsAsked:
    try:
        extras = [msgspec.json.decode(text, type=dict) for text in flags.extra]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--extra is no JSON object: {error}") from error
    return LoadsAsked(
        names=flags.load,
        model=flags.model,
        tokenizer=Path(flags.tokenizer).expanduser() if flags.tokenizer else None,
        seed=flags.seed,
        extras=extras,
        num_rounds=flags.rounds,
        timeout_s=flags.timeout_s,
    )


def _saver(output: OutputFlags) -> Callable[[Results], None]:
    """What keeps the results so far, for a run that somebody ends before it has."""

    def save(results: Results) -> None:
        if output.out:
            Path(output.out).expanduser().write_bytes(results.to_json())

    return save


def _give(measure: Callable[[], Results], output: OutputFlags) -> int:
    """Exit code 1: a server did not get through a load."""
    path = Path(output.out).expanduser() if output.out else None
    if path is not None:
        with suppress(OSError):  # which is told below
            path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    results = measure()
    if output.json:
        print_json(msgspec.to_builtins(results))
    else:
        _show(results)
    if path is not None:
        _saver(output)(results)
        report_note(f"written to {path}")
    return 1 if results.failures else 0


def _show(results: Results) -> None:
    """On standard output; plain text has no spaces at the ends of its lines."""
    out = console()
    if out.is_terminal:
        show(results, out)
        return
    with out.capture() as captured:
        show(results, out)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)
