"""Servers side by side: each load to all of them in turn, several times, and how they compare.

Decides the order and the figures that are compared; refuses to know which server is whose.
"""

from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from headrace.bench.loads import LOADS, LoadReport, Target, prompts_of, run_load, warm_up
from headrace.bench.prompts import PromptWriter

Figure = Callable[[LoadReport], float]
FIGURES: dict[str, Figure] = {
    "TTFT ms": lambda report: report.ttft_ms.p50,
    "TPOT ms": lambda report: report.tpot_ms.p50,
    "output tokens/s": lambda report: report.output_tokens_per_s,
    "wall s": lambda report: report.wall_s,
}


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """All that one server answered: `reports` has each load as often as it was offered."""

    url: str
    model: str
    reports: list[LoadReport]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one load, of every server in order.

    A ratio is that of the server's figure to the first server's in the same round, so that what
    slows the machine for a while slows both parts of it; `ratios` are the medians over the rounds.
    """

    load: str
    figure: str
    medians: list[float]
    ratios: list[float]  # 1.0 for the first server
    lowest_ratios: list[float]
    highest_ratios: list[float]


async def run_sides(
    targets: Sequence[Target], writer: PromptWriter, names: Sequence[str], num_rounds: int
) -> list[Side]:
    """Offer each load to one server after the other, `num_rounds` times, with the same prompts to
    all in a round, other ones in the next, and the order turned around each time.
    """
    sides = [Side(url=target.url, model=target.model, reports=[]) for target in targets]
    pairs = list(zip(targets, sides, strict=True))
    for target in targets:
        await warm_up(target, writer)
    for name in names:
        for number in range(num_rounds):
            prompts = prompts_of(LOADS[name], writer)
            for target, side in pairs if number % 2 == 0 else reversed(pairs):
                side.reports.append(await run_load(target, LOADS[name], prompts))
    return sides


def compare(sides: Sequence[Side]) -> list[Comparison]:
    """Every figure of every load. The sides have the same loads in the same order."""
    names = dict.fromkeys(report.load for report in sides[0].reports)
    return [
        _compare(sides, name, figure, value) for name in names for figure, value in FIGURES.items()
    ]


def _compare(sides: Sequence[Side], load: str, figure: str, value: Figure) -> Comparison:
    values = [[value(report) for report in side.reports if report.load == load] for side in sides]
    ratios = [
        [mine / first if first else 1.0 for mine, first in zip(row, values[0], strict=True)]
        for row in values
    ]
    return Comparison(
        load=load,
        figure=figure,
        medians=[median(row) for row in values],
        ratios=[median(row) for row in ratios],
        lowest_ratios=[min(row) for row in ratios],
        highest_ratios=[max(row) for row in ratios],
    )
