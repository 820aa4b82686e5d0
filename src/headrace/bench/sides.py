"""Servers side by side: each load to all of them in turn, several times, and how they compare.

Decides the order and the figures that are compared; refuses to know which server is whose.
"""

from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from headrace.bench.loads import (
    LOADS,
    WARM_UP,
    Load,
    LoadFailure,
    LoadReport,
    Target,
    prompts_of,
    try_load,
)
from headrace.bench.prompts import PromptWriter
from headrace.core.base.errors import HeadraceError

Figure = Callable[[LoadReport], float]
FIGURES: dict[str, Figure] = {
    "TTFT ms": lambda report: report.ttft_ms.p50,
    "TPOT ms": lambda report: report.tpot_ms.p50,
    "output tokens/s": lambda report: report.output_tokens_per_s,
    "wall s": lambda report: report.wall_s,
}


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """All that one server answered: `reports` has each load as often as it got through it."""

    url: str
    model: str
    reports: list[LoadReport]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one load, of every server in order; None where a server has none.

    A ratio is that of the server's figure to the first server's in the same round, so that what
    slows the machine for a while slows both parts of it; `ratios` are the medians over the rounds.
    """

    load: str
    figure: str
    medians: list[float | None]
    ratios: list[float | None]  # 1.0 for the first server
    lowest_ratios: list[float | None]
    highest_ratios: list[float | None]


Tell = Callable[[Sequence[Side], Sequence[LoadFailure]], None]


class Sides:
    """Offers loads to servers, and keeps what they answered and what they failed at."""

    def __init__(
        self, targets: Sequence[Target], writer: PromptWriter, timeout_s: float, tell: Tell
    ) -> None:
        """`timeout_s`: of each load at each server. `tell` hears of all so far after each load."""
        self.sides = [Side(url=target.url, model=target.model, reports=[]) for target in targets]
        self.failures: list[LoadFailure] = []
        self._pairs = list(zip(targets, self.sides, strict=True))
        self._writer = writer
        self._timeout_s = timeout_s
        self._tell = tell

    async def run(self, names: Sequence[str], num_rounds: int) -> None:
        """Offer each load to one server after the other, `num_rounds` times, with the same prompts
        to all in a round, other ones in the next, and the order turned around each time.

        A server that fails at a load does not get it again; one that fails at the warm-up, before
        everything or after a failure, gets nothing more. HeadraceError if that was the only one.
        """
        for target in [target for target, _ in self._pairs]:
            await self._warm_up(target)
        for name in names:
            pairs = self._pairs.copy()
            for number in range(num_rounds):
                prompts = prompts_of(LOADS[name], self._writer)
                for target, side in pairs[:: 1 if number % 2 == 0 else -1]:
                    if not await self._offer(target, side, LOADS[name], prompts):
                        pairs.remove((target, side))

    async def _warm_up(self, target: Target) -> None:
        prompts = prompts_of(WARM_UP, self._writer)
        result = await try_load(target, WARM_UP, prompts, self._timeout_s)
        if isinstance(result, LoadFailure):
            self._fail(result)
            self._pairs = [pair for pair in self._pairs if pair[0] is not target]
            if len(self.sides) == 1:
                raise HeadraceError(f"{target.url}: {result.reason}")

    async def _offer(self, target: Target, side: Side, load: Load, prompts: Sequence[str]) -> bool:
        """Whether it got through. If not, the next load waits until what is left of this one, which
        some servers go on with, leaves room for a warm-up.
        """
        result = await try_load(target, load, prompts, self._timeout_s)
        if isinstance(result, LoadFailure):
            self._fail(result)
            await self._warm_up(target)
            return False
        side.reports.append(result)
        self._tell(self.sides, self.failures)
        return True

    def _fail(self, failure: LoadFailure) -> None:
        self.failures.append(failure)
        self._tell(self.sides, self.failures)


def compare(sides: Sequence[Side]) -> list[Comparison]:
    """Every figure of every load. A side's reports of a load are those of the first rounds."""
    names = dict.fromkeys(report.load for side in sides for report in side.reports)
    return [
        _compare(sides, name, figure, value) for name in names for figure, value in FIGURES.items()
    ]


def _compare(sides: Sequence[Side], load: str, figure: str, value: Figure) -> Comparison:
    values = [[value(report) for report in side.reports if report.load == load] for side in sides]
    ratios = [
        [mine / first if first else 1.0 for mine, first in zip(row, values[0], strict=False)]
        for row in values
    ]
    return Comparison(
        load=load,
        figure=figure,
        medians=[median(row) if row else None for row in values],
        ratios=[median(row) if row else None for row in ratios],
        lowest_ratios=[min(row, default=None) for row in ratios],
        highest_ratios=[max(row, default=None) for row in ratios],
    )
