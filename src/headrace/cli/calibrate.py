"""`headrace calibrate`: what steps take on this machine, and what passes around them."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table

from headrace.bench.calibrate import calibration_of, measure
from headrace.bench.server import arguments_of
from headrace.cli.output import (
    console,
    print_json,
    print_table,
    report_note,
    showing_progress,
)
from headrace.cli.plan_answer import right_aligned
from headrace.cli.plan_target import check_range
from headrace.cli.sim_cost import USUAL_ERROR
from headrace.core.base.errors import ConfigError
from headrace.core.config.units import counted
from headrace.core.cost.calibration import LARGE_STEP_TOKENS, Calibration
from headrace.core.cost.formula import KNOTS
from headrace.live.cost_file import write_calibration
from headrace.live.step_log import read_logs
from headrace.models.files import check_writable
from headrace.models.hub import resolve_model

EVERY_S: Final = 10.0  # a line, where there is no terminal


def calibrate(
    model: str | None,
    logs: Sequence[str],
    *,
    serve: str,
    passes: int,
    out: str | None,
    as_json: bool,
) -> int:
    check_range("--passes", passes, 1, 100)
    if logs and (model or serve):
        raise ConfigError(
            "recorded logs say what ran", hint="leave out MODEL and --serve, or --from"
        )
    path = Path(out).expanduser() if out else None
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if path is not None:
        check_writable(path)
    if logs:
        paths = [Path(log).expanduser() for log in logs]
        if len({one.resolve() for one in paths}) < len(paths):
            raise ConfigError(
                "--from names a log twice", hint="once for each worker that shared the machine"
            )
        times = read_logs(paths)
        found = calibration_of(times, (), num_workers=len(logs), source=", ".join(logs))
    else:
        words = arguments_of(serve)
        with showing_progress() as report:
            file = resolve_model(model or "", lambda done, total: report("fetch", done, total))
        with showing_rounds() as on_round:
            found = measure(words, file, num_passes=passes, on_round=on_round)
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        for table in (steps_table(found), around_table(found), seen_table(found)):
            print_table(table)
    if found.held_out.mean > USUAL_ERROR:
        report_note(
            f"warning: steps that the fit had not seen are off by {found.held_out.mean:.0%} on "
            f"average, usual are 10 to 20 %: was the machine busy with something else?"
        )
    if path is not None:
        write_calibration(path, found)
        report_note(f"written to {path}")
    return 0


@contextmanager
def showing_rounds() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere a line when the load begins, since it takes long, and then now
    and then.
    """
    out = console(sys.stderr)
    if not out.is_terminal:
        last_s = time.monotonic()

        def note(done: int, total: int) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            if not done:
                report_note(f"{total} rounds of requests: half a minute for each worker and pass")
            elif now_s - last_s >= EVERY_S:
                report_note(f"{done} of {total} rounds have ended")
            else:
                return
            last_s = now_s

        yield note
        return

    from rich.progress import Progress, TaskID

    with Progress(console=out, transient=True) as bars:
        tasks: list[TaskID] = []

        def show(done: int, total: int) -> None:
            if not tasks:
                tasks.append(bars.add_task("rounds of requests", total=total))
            bars.update(tasks[0], completed=done)

        yield show


def steps_table(found: Calibration) -> Table:
    """The coefficients, in the unit that makes each of them readable."""
    cost = found.steps
    table = right_aligned("a step takes, alone on its cores", "part", "cost", "unit")
    for tokens, cost_ns in zip(KNOTS, cost.knot_ns, strict=True):
        table.add_row(counted(tokens, "token"), f"{cost_ns / 1e6:.2f}", "ms")
    for name, cost_ns in (
        ("each sequence", cost.seq_ns),
        ("each row of logits", cost.logit_row_ns),
        ("1,000 attention pairs", 1e3 * cost.attention_pair_ns),
        ("1,000 tokens of KV", 1e3 * cost.kv_token_ns),
    ):
        table.add_row(name, f"{cost_ns / 1e3:.1f}", "µs")
    return table


def around_table(found: Calibration) -> Table:
    host = found.host
    table = right_aligned("around steps", "part", "figure", "unit")
    rows = [
        ("of a step outside the executor", f"{found.host_share:.1%}", "of its time"),
        ("a request to the engine", f"{host.request.fixed_ns / 1e6:.2f}", "ms"),
        ("… each prompt token", f"{host.request.each_ns / 1e3:.2f}", "µs"),
    ]
    if host.has_client:
        rows += [
            ("the first token to the client", f"{host.first_token_ns / 1e6:.2f}", "ms"),
            ("a later token to the client", f"{host.token_ns / 1e6:.2f}", "ms"),
        ]
    rows += [
        (f"{step} while {number} workers are in one", f"{factor:.2f}", "times as long")
        for step, factors in (
            ("a step", found.slow_down),
            (f"… of {LARGE_STEP_TOKENS} tokens or more", found.slow_down_large),
        )
        for number, factor in enumerate(factors[1:], 2)
    ]
    if found.kv_link is not None:
        rows += [
            ("a copy of KV", f"{found.kv_link.latency_ns / 1e6:.2f}", "ms"),
            ("… each block", f"{found.kv_link.byte_ns / 1e3:.1f}", "µs"),
        ]
    for row in rows:
        table.add_row(*row)
    return table


def seen_table(found: Calibration) -> Table:
    error = found.held_out
    table = right_aligned(f"{found.source} on {found.machine}", "what", "figure")
    table.add_row("steps held out of a first fit", str(error.num_steps))
    table.add_row("mean relative error of these", f"{error.mean:.1%}")
    table.add_row("p50 · p95", f"{error.p50:.1%} · {error.p95:.1%}")
    table.add_row("of their time together", f"{error.bias:+.1%}")
    for name, largest in msgspec.structs.asdict(found.seen.largest).items():
        words = name.removeprefix("num_").replace("_", " ")
        table.add_row(f"most {words} of a step", f"{largest:,}")
    table.add_row("most workers in a step at once", str(found.seen.num_workers))
    return table
