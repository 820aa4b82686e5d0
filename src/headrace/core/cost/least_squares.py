"""Least squares with coefficients that are not negative, shrunk towards a prior, in plain Python.

For a dozen features that is a few milliseconds, and the core needs no numerical library.
"""

from collections.abc import Sequence
from itertools import pairwise
from operator import mul

# How much the prior counts, in samples; and how much neighbours in a chain are held together.
PRIOR_WEIGHT = 0.002
CHAIN_WEIGHT = 0.1
# The same for features that no sample has: they follow their neighbours before the prior.
UNSEEN_PRIOR_WEIGHT = 1e-6
UNSEEN_CHAIN_WEIGHT = 1e-4
# Gradients and coefficients below this, relative to the prior's, are taken for rounding.
TOLERANCE = 1e-9
# Samples that are kept until they are added up, which costs little more for many than for one.
MAX_ROWS = 128


class NormalEquations:
    """The sums that decide a fit of `value ≈ row · coefficients`. Samples are folded in, not kept.

    Errors count relative to the value, so that a short step is fitted as well as a long one.
    Samples are folded in together, which costs O(features²) for all of them and little for each.
    """

    def __init__(self, num_features: int) -> None:
        self.weight = 0.0  # of all samples; their number, unless they fade
        self._gram = [[0.0] * num_features for _ in range(num_features)]  # lower triangle
        self._moment = [0.0] * num_features
        self._rows: list[list[float]] = []  # scaled, with their values; not in the sums yet
        self._free: list[int] = []  # coefficients that were not 0 in the last solution

    def add(self, row: Sequence[float], value: float, scale: float | None = None) -> None:
        """`value` > 0. Its error counts relative to `scale` where that is given: one that does not
        depend on the value's own noise leaves the mean of many values where it is.
        """
        self.weight += 1.0
        scale = scale or value
        self._rows.append([entry / scale for entry in (*row, value)])
        if len(self._rows) == MAX_ROWS:
            self._fold()

    def _fold(self) -> None:
        """Let the sums have all samples."""
        *columns, goals = zip(*self._rows, strict=True)
        self._rows.clear()
        seen = [index for index, column in enumerate(columns) if any(column)]
        for place, index in enumerate(seen):
            column, sums = columns[index], self._gram[index]
            self._moment[index] += sum(map(mul, column, goals))
            for other in seen[: place + 1]:
                sums[other] += sum(map(mul, column, columns[other]))

    def fade(self, factor: float) -> None:
        """Let what was added so far count `factor` times as much."""
        if self._rows:
            self._fold()
        self.weight *= factor
        self._moment = [entry * factor for entry in self._moment]
        self._gram = [[entry * factor for entry in sums] for sums in self._gram]

    def solve(self, prior: Sequence[float], chain: range = range(0)) -> list[float]:
        """The coefficients, none negative.

        The prior's proportions (all positive) are taken at the speed of the samples, the one factor
        that fits them best; from there the solution moves as far as the samples tell. So features
        that never varied, or only together, keep their proportion. Where features of the chain were
        never seen, they follow their neighbours.
        """
        if self._rows:
            self._fold()
        size = len(prior)
        gram = [
            [self._gram[max(i, j)][min(i, j)] * prior[i] * prior[j] for j in range(size)]
            for i in range(size)
        ]
        moment = [entry * p for entry, p in zip(self._moment, prior, strict=True)]
        total = sum(sum(sums) for sums in gram)
        speed = sum(moment) / total if total > 0.0 else 1.0
        quadratic = [[entry * speed**2 for entry in sums] for sums in gram]
        linear = [entry * speed for entry in moment]
        # The square of a feature's own part of a typical sample: a tie must be as weak as that, or
        # the prior would win wherever it is too low. The pull is as strong as the part itself: time
        # that samples leave open between features is divided as the prior would; by the squares, a
        # tiny one would take as much as a large one.
        share = [quadratic[i][i] / max(self.weight, 1.0) for i in range(size)]
        for i in range(size):
            pull = PRIOR_WEIGHT * share[i] ** 0.5 + UNSEEN_PRIOR_WEIGHT
            quadratic[i][i] += pull
            linear[i] += pull
        for i, j in pairwise(chain):
            tie = CHAIN_WEIGHT * max(share[i], share[j]) + UNSEEN_CHAIN_WEIGHT
            for row, col, weight in ((i, i, tie), (j, j, tie), (i, j, -tie), (j, i, -tie)):
                quadratic[row][col] += weight
        units = minimise(quadratic, linear, self._free)
        self._free = [index for index, unit in enumerate(units) if unit > 0.0]
        return [speed * p * unit for p, unit in zip(prior, units, strict=True)]


def minimise(
    quadratic: list[list[float]], linear: list[float], likely: Sequence[int] = ()
) -> list[float]:
    """The u >= 0 with the least `u·Qu/2 - q·u`, Q symmetric and positive definite.

    Lawson and Hanson's active set: coefficients are freed from 0 one by one, and held there again
    when they would turn negative; those that are `likely` not 0 are free to begin with. Each round
    lowers the value, so it ends; the bound on the rounds is for rounding errors.
    """
    size = len(linear)
    u = [0.0] * size
    free = _Free(quadratic, linear)
    for place in likely:
        free.add(place)
    for _ in range(3 * size):
        _settle(free, u)
        slopes = {
            i: linear[i] - sum([quadratic[i][j] * u[j] for j in free.places])
            for i in range(size)
            if i not in free.places
        }
        steepest = max(slopes, key=slopes.__getitem__, default=None)
        if steepest is None or slopes[steepest] <= TOLERANCE:
            break
        free.add(steepest)
    return u


def _settle(free: "_Free", u: list[float]) -> None:
    """Move `u` to the best that the free coefficients allow; some of them are held at 0 again."""
    while free.places:
        best = free.solve()
        blocked = [(i, goal) for i, goal in zip(free.places, best, strict=True) if goal <= 0.0]
        if not blocked:
            for i, goal in zip(free.places, best, strict=True):
                u[i] = goal
            return
        part = min(u[i] / (u[i] - goal) if u[i] > 0.0 else 0.0 for i, goal in blocked)
        for i, goal in zip(free.places, best, strict=True):
            u[i] += part * (goal - u[i])
        held = [i for i, _ in blocked if u[i] <= TOLERANCE] or [blocked[0][0]]
        for i in held:
            u[i] = 0.0
            free.remove(i)


class _Free:
    """The equations of some rows and columns of a positive definite matrix, solved by Cholesky.

    Rows of the factor depend on those before them alone, so one more place costs one more row.
    """

    def __init__(self, matrix: list[list[float]], right: list[float]) -> None:
        self.places: list[int] = []
        self._matrix = matrix
        self._right = right
        self._lower: list[list[float]] = []
        self._forward: list[float] = []  # the factor's rows solved for the right side

    def add(self, place: int) -> None:
        values, row = self._matrix[place], list[float]()
        for other, above in zip(self.places, self._lower, strict=True):
            row.append((values[other] - sum(map(mul, row, above))) / above[-1])
        row.append(max(values[place] - sum(map(mul, row, row)), 1e-300) ** 0.5)
        forward = self._right[place] - sum(map(mul, row, self._forward))
        self._forward.append(forward / row[-1])
        self.places.append(place)
        self._lower.append(row)

    def remove(self, place: int) -> None:
        index = self.places.index(place)
        behind = self.places[index + 1 :]
        for kept in (self.places, self._lower, self._forward):
            del kept[index:]
        for other in behind:
            self.add(other)

    def solve(self) -> list[float]:
        lower, x = self._lower, self._forward.copy()
        for index in reversed(range(len(x))):
            below = [row[index] for row in lower[index + 1 :]]
            x[index] = (x[index] - sum(map(mul, below, x[index + 1 :]))) / lower[index][index]
        return x
