"""Two ways to serve the same requests, side by side: figures, their difference, and how sure it is.

Intervals are by a paired block bootstrap (Künsch 1989; Efron 1979): requests in the order of their
arrival are cut into blocks of neighbours, since neighbours in a queue share their fate; blocks are
drawn anew with replacement, the same ones for both ways, and every figure is computed for every
draw. What holds 95 % of the draws is the interval. Common random numbers: both ways serve the same
requests at the same times, under the same seeds.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, isnan
from operator import mul
from random import Random
from typing import Final

import msgspec

from headrace.sim.outcomes import LATENCIES, Miss, Outcomes

NUM_BLOCKS: Final = 50
NUM_DRAWS: Final = 400
SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_PARTS: Final = ("requests", "good", "refused", "prompt", "cached", "output", "good_output")
TAIL: Final = 0.025  # of the draws, beyond each end of the interval

Weights = Sequence[int]
"""How often each block is drawn."""
Figures = dict[str, float | None]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. None where nothing was measured."""

    before: float | None
    after: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve, under one seed or several."""

    outcomes: tuple[Outcomes, ...]
    span_s: float  # from the first arrival to the last
    price_per_hour: float = 0.0  # of a worker


class Misses(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that missed a limit for a cause, on average over the seeds."""

    metric: str
    cause: str
    before: float
    after: float


def compare(
    before: Run, after: Run, *, seed: int = 0, num_draws: int = NUM_DRAWS
) -> dict[str, Compared]:
    """By name of the figure; the unit is in the name. Both have as many seeds and requests."""
    sides = [_Side(before), _Side(after)]
    whole = [side.figures([1] * side.num_blocks) for side in sides]
    draws: list[tuple[Figures, Figures]] = []
    rng = Random(seed)
    for _ in range(num_draws if sides[0].num_blocks > 1 else 0):
        weights = _draw(rng, sides[0])
        draws.append((sides[0].figures(weights), sides[1].figures(weights)))
    return {name: _compared(name, whole[0], whole[1], draws) for name in whole[0]}


def figures(run: Run) -> Figures:
    side = _Side(run)
    return side.figures([1] * side.num_blocks)


def misses(before: Run, after: Run) -> list[Misses]:
    """Those of either, the ones that changed most first."""
    was, will = _mean_misses(before), _mean_misses(after)
    found = [
        Misses(metric=miss[0], cause=miss[1], before=was.get(miss, 0.0), after=will.get(miss, 0.0))
        for miss in was.keys() | will.keys()
    ]
    return sorted(found, key=lambda one: (-abs(one.after - one.before), one.metric, one.cause))


def _mean_misses(run: Run) -> Mapping[Miss, float]:
    found: Counter[Miss] = Counter()
    for outcomes in run.outcomes:
        found += outcomes.misses
    return {miss: count / len(run.outcomes) for miss, count in found.items()}


def _draw(rng: Random, side: "_Side") -> list[int]:
    """Places are drawn, and for each of them one of the seeds."""
    weights = [0] * side.num_blocks
    num_places = side.num_blocks // side.num_seeds
    for _ in range(num_places):
        weights[rng.randrange(num_places) + num_places * rng.randrange(side.num_seeds)] += 1
    return weights


def _compared(
    name: str, before: Figures, after: Figures, draws: Sequence[tuple[Figures, Figures]]
) -> Compared:
    one, other = before[name], after[name]
    if one is None or other is None:
        return Compared(before=one, after=other)
    spread = sorted(
        b - a
        for drawn_before, drawn_after in draws
        if (a := drawn_before[name]) is not None and (b := drawn_after[name]) is not None
    )
    if not spread:
        return Compared(before=one, after=other, difference=other - one)
    last = len(spread) - 1
    return Compared(
        before=one,
        after=other,
        difference=other - one,
        low=spread[round(last * TAIL)],
        high=spread[round(last * (1 - TAIL))],
    )


class _Side:
    """One way, cut into blocks: sums by block, and latencies in order with the block of each."""

    def __init__(self, run: Run) -> None:
        self.num_seeds = len(run.outcomes)
        self._run = run
        num = len(run.outcomes[0])
        size = max(1, ceil(num / NUM_BLOCKS))
        num_places = max(1, ceil(num / size))
        self.num_blocks = num_places * self.num_seeds
        self._sums = {name: [0.0] * self.num_blocks for name in (*LATENCIES, *_PARTS)}
        self._ordered: dict[str, tuple[list[float], list[int]]] = {}
        latencies: dict[str, list[tuple[float, int]]] = {name: [] for name in LATENCIES}
        for index, outcomes in enumerate(run.outcomes):
            for place in range(num):
                block = index * num_places + place // size
                self._add(outcomes, place, block)
                for name, values in latencies.items():
                    value = outcomes.latencies[name][place]
                    if not isnan(value):
                        values.append((value, block))
                        self._sums[name][block] += value
        for name, values in latencies.items():
            values.sort()
            self._ordered[name] = [value for value, _ in values], [block for _, block in values]

    def _add(self, outcomes: Outcomes, place: int, block: int) -> None:
        num_output = outcomes.output_tokens[place]
        parts = (
            1,
            outcomes.good[place],
            1 - outcomes.is_served[place],
            outcomes.prompt_tokens[place],
            outcomes.cached_tokens[place],
            num_output,
            num_output * outcomes.good[place],
        )
        for name, value in zip(_PARTS, parts, strict=True):
            self._sums[name][block] += value

    def figures(self, weights: Weights) -> Figures:
        total = {name: sum(map(mul, weights, self._sums[name])) for name in _PARTS}
        num = total["requests"] or 1.0
        # A draw of more requests than there are stands for a longer time.
        num_all = sum(self._sums["requests"])
        span_s = self._run.span_s * self.num_seeds * num / num_all
        found: Figures = {
            "goodput_per_s": total["good"] / span_s,
            "attainment": total["good"] / num,
            "refused_share": total["refused"] / num,
            "hit_rate": total["cached"] / (total["prompt"] or 1.0),
            "output_tokens_per_s": total["output"] / span_s,
        }
        for name in LATENCIES:
            found |= self._latency(name, weights)
        return found | self._cost(total, num / num_all)

    def _latency(self, name: str, weights: Weights) -> Figures:
        values, blocks = self._ordered[name]
        sums = list(accumulate(map(weights.__getitem__, blocks)))
        if not sums or not sums[-1]:
            return {f"{name}_{part}": None for part in ("mean", *SHARES)}
        total = sum(map(mul, weights, self._sums[name]))
        found: Figures = {f"{name}_mean": total / sums[-1]}
        for part, share in SHARES.items():
            found[f"{name}_{part}"] = values[bisect_left(sums, ceil(share * sums[-1]))]
        return found

    def _cost(self, total: Mapping[str, float], share: float) -> Figures:
        """Workers are paid for from the first arrival to the last end."""
        runs = self._run.outcomes
        hours = sum(one.num_workers * one.end_s for one in runs) / 3600 * share
        found: Figures = {"worker_hours": hours / len(runs) / (share or 1.0)}
        millions = total["good_output"] / 1e6
        if self._run.price_per_hour:
            price = self._run.price_per_hour
            found["cost_usd"] = hours * price / len(runs) / (share or 1.0)
            found["cost_usd_per_million_good_tokens"] = (
                hours * price / millions if millions else None
            )
        else:
            found["worker_hours_per_million_good_tokens"] = hours / millions if millions else None
        return found
