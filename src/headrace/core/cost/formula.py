"""The arithmetic of cost models, apart from their words.

A scheduler, a router and a simulation ask for it some fifty times for each request. In wheels it is
translated into C, which the models themselves cannot be: they are structs.
"""

from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import Final

from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.cost.least_squares import NormalEquations

# Tokens of a step between which its cost is linear; beyond the last knot the last slope goes on.
KNOTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NUM_STEP_FEATURES: Final = len(KNOTS) + 4

Figures = tuple[int, int, int, int, int]
"""Of a StepShape, in its order."""


class KnotFormula:
    """The duration of a step: `knot_ns[i]` for KNOTS[i] tokens, linear between, and each figure's
    own.
    """

    def __init__(
        self,
        knot_ns: tuple[float, ...],
        seq_ns: float,
        logit_row_ns: float,
        attention_pair_ns: float,
        kv_token_ns: float,
    ) -> None:
        self._knot_ns = knot_ns
        self._seq_ns = seq_ns
        self._logit_row_ns = logit_row_ns
        self._attention_pair_ns = attention_pair_ns
        self._kv_token_ns = kv_token_ns

    def ns(
        self,
        num_tokens: int,
        num_seqs: int,
        num_logit_rows: int,
        num_attention_pairs: int,
        num_kv_tokens: int,
    ) -> Ns:
        """At least 1."""
        low = bisect_right(KNOTS, num_tokens, 1, len(KNOTS) - 1) - 1
        start_ns, end_ns = self._knot_ns[low], self._knot_ns[low + 1]
        total = (
            start_ns
            + (end_ns - start_ns) * (num_tokens - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])
            + self._seq_ns * num_seqs
            + self._logit_row_ns * num_logit_rows
            + self._attention_pair_ns * num_attention_pairs
            + self._kv_token_ns * num_kv_tokens
        )
        return Ns(round(total) or 1)


class StepSums:
    """What recorded steps sum up to, in bounded memory.

    With `half_life`, a sample counts half after that many more, so that the fit follows a machine
    that becomes slower or faster.
    """

    def __init__(self, half_life: int | None) -> None:
        self.equations = NormalEquations(NUM_STEP_FEATURES)
        self.num_samples = 0
        self.largest = [0, 0, 0, 0, 0]  # each figure by itself
        self._half_life = half_life
        self._num_unfaded = 0

    def add(self, figures: Figures, elapsed_ns: Ns, scale_ns: Ns | None) -> None:
        """The error counts relative to `scale_ns` where that is given (see NormalEquations.add)."""
        self.equations.add(_features(figures), max(1, elapsed_ns), scale_ns)
        self.num_samples += 1
        largest = self.largest
        for place, figure in enumerate(figures):
            if figure > largest[place]:
                largest[place] = figure
        self._num_unfaded += 1
        # Fading costs as much as a sample; an eighth of the half-life is smooth enough.
        if self._half_life is not None and self._num_unfaded * 8 >= self._half_life:
            self.equations.fade(0.5 ** (self._num_unfaded / self._half_life))
            self._num_unfaded = 0


@lru_cache(maxsize=4096)
def _within_knots(num_tokens: int) -> tuple[float, ...]:
    n = max(num_tokens, 1)
    within = [float(min(max(n - a, 0), b - a)) for a, b in pairwise(KNOTS[:-1])]
    return (1.0, *within, float(max(n - KNOTS[-2], 0)))


def _features(figures: Figures) -> list[float]:
    """The factors of a fit's coefficients: 1, the tokens within each interval of knots, and the
    other figures.
    """
    num_tokens, *rest = figures
    return [*_within_knots(num_tokens), *rest]


def roof_ns(
    kv: range,
    *,
    flop: float,
    pair_flop: float,
    flop_per_s: float,
    tp: int,
    weight_bytes: float,
    kv_elems: float,
    elem_bytes: float,
    kv_ranks: int,
    bytes_per_s: float,
    more_ns: tuple[float, float],
) -> list[Ns]:
    """Of steps that attend to and read so many KV tokens: arithmetic or memory, whichever takes
    longer, and what is beside both.
    """
    link_ns, overhead_ns = more_ns
    found: list[Ns] = []
    for num in kv:
        flop_ns = (flop + num * pair_flop) / tp / flop_per_s * NS_PER_S
        read_ns = (weight_bytes + kv_elems * num * elem_bytes / kv_ranks) / bytes_per_s * NS_PER_S
        roof = flop_ns if flop_ns > read_ns else read_ns
        found.append(Ns(round(roof + link_ns + overhead_ns) or 1))
    return found
