"""python -m headrace.bench.twin [--out FILE] [--span-s SECONDS] [NAME ...]

Each case has a server of its own, which is calibrated by a load of its own between the parts of
the one that it is tested with, and is then simulated. What was recorded of a case is kept in
FILE.cases, so that a run that was ended goes on with the next one. Takes twenty minutes.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.bench.machine import Machine, machine
from headrace.bench.suite import tokenizer_of
from headrace.bench.twin.cases import CASES, USUAL_SPAN_S, Case
from headrace.bench.twin.figures import Row, Served, compare, head, hits, line
from headrace.bench.twin.session import prompts_of, record, recorded
from headrace.bench.twin.simulated import simulate_session
from headrace.core.base.errors import ConfigError, HeadraceError
from headrace.core.cost.calibration import Calibration
from headrace.models.files import check_writable
from headrace.models.hub import resolve_model


class TwinReport(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    calibrations: dict[str, Calibration]  # by case
    rows: list[Row]


def measure_all(
    cases: Sequence[Case], span_s: float, folder: Path, report: Callable[[Row], None]
) -> TwinReport:
    """Records what is not yet in the folder."""
    path = resolve_model("")
    encode = tokenizer_of(path).encode
    found = TwinReport(machine=machine(), calibrations={}, rows=[])
    for case in cases:
        place = folder / case.name.replace(", ", "-").replace(" ", "-")
        try:
            if (kept := recorded(place, span_s)) is None:
                record(case, encode, path, span_s, place)
                kept = recorded(place, span_s)
        except HeadraceError as error:  # the other cases are worth having
            print(f"left out: {case.name}: {error}", file=sys.stderr)
            continue
        if kept is None:
            continue
        session, times = kept
        pieces, parts = prompts_of(case, encode, span_s)
        said = simulate_session(case, session, times, pieces, parts)
        found.calibrations[case.name] = said.calibration
        found.rows.append(
            compare(
                case.name,
                [Served.of_answer(answer) for part in session.parts for answer in part],
                [[Served.of_record(one) for one in run] for run in said.runs],
                load_average=session.load_average,
                slowness=said.slowness,
            )
        )
        report(found.rows[-1])
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.twin", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases; none = all")
    parser.add_argument("--out", type=Path, help="file for the JSON; the table lies beside it")
    parser.add_argument(
        "--span-s", type=float, default=USUAL_SPAN_S, help="seconds of each load; default 54"
    )
    asked = parser.parse_args(arguments)
    known = {case.name: case for case in CASES}
    if unknown := [name for name in asked.names if name not in known]:
        raise ConfigError(f"no such case: {unknown[0]}", hint="known: " + "; ".join(known))
    if not 3.0 <= asked.span_s <= 3600.0:
        raise ConfigError(f"--span-s is {asked.span_s:g}", hint="say 3 to 3600")
    if asked.out:
        if asked.out.suffix == ".md":
            raise ConfigError("--out is the file of the JSON; the table is FILE.md beside it")
        check_writable(asked.out)
    cases = [known[name] for name in asked.names] or list(CASES)
    print(head(), flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-twin-") as passing:
        folder = asked.out.with_name(asked.out.name + ".cases") if asked.out else Path(passing)
        found = measure_all(cases, asked.span_s, folder, lambda row: print(line(row), flush=True))
    print(hits(found.rows))
    if asked.out:
        data = msgspec.json.format(msgspec.json.encode(found), indent=2)
        asked.out.write_bytes(data + b"\n")
        table = "\n".join([head(), *map(line, found.rows)])
        asked.out.with_suffix(".md").write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
