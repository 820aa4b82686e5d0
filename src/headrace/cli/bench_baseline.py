"""`headrace bench baseline` and `headrace bench compare`: what a change of the code has moved."""

from pathlib import Path

import msgspec

from headrace.bench.baseline import difference, measure_baseline, read_baseline, write_baseline
from headrace.bench.tables import change_table
from headrace.cli.output import console, print_json, print_table


def write(file: str, *, with_ratios: bool, seconds: float) -> int:
    path = Path(file).expanduser()
    write_baseline(path, measure_baseline(with_ratios=with_ratios, seconds=seconds))
    print(path)
    return 0


def compare(file: str, *, with_ratios: bool, seconds: float, as_json: bool) -> int:
    before = read_baseline(Path(file).expanduser())
    found = difference(before, measure_baseline(with_ratios=with_ratios, seconds=seconds))
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        if found.changes:
            print_table(change_table(found.changes))
        for kind, reason in found.not_compared.items():
            console().print(f"not compared: {kind} ({reason})", soft_wrap=True, markup=False)
        print(f"{found.num_compared} figures compared, {len(found.changes)} changed")
    return 1 if found.changes else 0
