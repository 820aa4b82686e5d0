"""A cost model fitted to recorded steps.

A step's duration is the sum of

- a piecewise-linear function of its tokens with fixed knots: flat where reading the weights
  dominates, rising where the arithmetic does, and whatever the kernels do in between;
- a cost for each sequence, each row of logits, each attention pair (arithmetic) and each KV token
  read (bandwidth).

No coefficient is negative, so more work never costs less. A decode step has as many sequences and
rows of logits as tokens, and as many pairs as KV tokens: only mixed steps tell these apart, and
until some were seen they keep the proportions of the prior.
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate, pairwise
from math import isfinite

import msgspec

from headrace.core.base.errors import InvariantError
from headrace.core.base.metrics import percentile
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.cost.formula import KNOTS, KnotFormula, StepSums
from headrace.core.cost.least_squares import NormalEquations
from headrace.core.cost.model import CostModel, StepShape

SLOPES = range(1, len(KNOTS))  # places of the slopes between knots among the features


class Link(msgspec.Struct, frozen=True):
    """A way for KV between two places: a copy takes the latency and then the bytes' time."""

    latency_ns: float
    byte_ns: float

    @property
    def bytes_per_s(self) -> float:
        return NS_PER_S / max(self.byte_ns, 1e-6)  # a fit may find that bytes take no time

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, Ns]], *, prior: "Link | None" = None) -> "Link":
        """Fit to (bytes, duration) of recorded copies."""
        prior = prior or LINK_PRIOR
        equations = NormalEquations(2)
        for num_bytes, elapsed_ns in samples:
            equations.add((1.0, float(num_bytes)), max(1, elapsed_ns))
        return cls(*equations.solve((prior.latency_ns, prior.byte_ns)))


LINK_PRIOR = Link(latency_ns=20_000.0, byte_ns=0.1)  # 10 GB/s


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors `|predicted - actual| / actual` over samples; bias keeps the sign."""

    num_samples: int
    mean: float
    bias: float
    p50: float
    p90: float
    max: float


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded steps beside what was predicted of each by those before it."""

    num_steps: int = 0
    took_ns: int = 0  # all together, as their driver saw them
    predicted_ns: int = 0
    error_ns: int = 0  # by how much predictions were off, without sign
    late_ns: int = 0  # of what they took, outside the device: the driver was late

    def __add__(self, other: "StepTimes") -> "StepTimes":
        return StepTimes(
            num_steps=self.num_steps + other.num_steps,
            took_ns=self.took_ns + other.took_ns,
            predicted_ns=self.predicted_ns + other.predicted_ns,
            error_ns=self.error_ns + other.error_ns,
            late_ns=self.late_ns + other.late_ns,
        )


class FittedCostModel(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The CostModel of one worker. Frozen: a log that carries it replays to the same plans."""

    name: str
    knot_ns: tuple[float, ...]  # of a step of KNOTS[i] tokens, apart from all that follows
    seq_ns: float
    logit_row_ns: float
    attention_pair_ns: float
    kv_token_ns: float
    links: dict[str, Link] = {}
    num_samples: int = 0  # recorded steps behind it; 0 = nothing was measured
    largest: StepShape | None = None  # of these, each figure by itself
    times: StepTimes = StepTimes()  # how well such a fit knew the next steps, where that is kept

    def __post_init__(self) -> None:
        costs = (*self.knot_ns, self.seq_ns, self.logit_row_ns)
        costs += (self.attention_pair_ns, self.kv_token_ns)
        if len(self.knot_ns) != len(KNOTS):
            raise ValueError(f"expected {len(KNOTS)} knots, got {len(self.knot_ns)}")
        if not all(isfinite(cost) and cost >= 0.0 for cost in costs):
            raise ValueError("costs must be finite and not negative")
        if any(after < before for before, after in pairwise(self.knot_ns)):
            raise ValueError("more tokens must not cost less")

    # ---- predictions

    @cached_property
    def formula(self) -> KnotFormula:
        """What `step_ns` says, for those who ask so often that no shape should be made for it."""
        return KnotFormula(
            self.knot_ns,
            self.seq_ns,
            self.logit_row_ns,
            self.attention_pair_ns,
            self.kv_token_ns,
        )

    def step_ns(self, shape: StepShape) -> Ns:
        return self.formula.ns(*msgspec.structs.astuple(shape))

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        """Raises InvariantError for a link that nobody described."""
        found = self.links.get(link)
        if found is None:
            raise InvariantError("no such link", link=link, known=sorted(self.links))
        return Ns(max(1, round(found.latency_ns + found.byte_ns * num_bytes)))

    # ---- fits

    @classmethod
    def prior(cls) -> "FittedCostModel":
        """Before any sample: about what a two-core laptop CPU does with a model of 135M parameters.

        Its proportions also fill in what samples leave open.
        """
        slopes_ns = (3e5, 3e5, 3e5, 3e5, 4e5, 4e5, 4e5, 4e5, 4e5, 4e5)
        return cls._from_coefficients(
            "prior: 135M parameters on a laptop CPU",
            [6e6, *slopes_ns, 2e4, 6e4, 300.0, 1000.0],
            {
                "memory": Link(latency_ns=5_000.0, byte_ns=0.1),
                "disk": Link(latency_ns=100_000.0, byte_ns=1.0),
                "tcp": Link(latency_ns=200_000.0, byte_ns=1.0),
            },
        )

    @classmethod
    def fit(
        cls,
        samples: Iterable[tuple[StepShape, Ns]],
        *,
        name: str = "fitted",
        prior: "FittedCostModel | None" = None,
    ) -> "FittedCostModel":
        """Fit to recorded steps; without any, this is the prior. Links are the prior's."""
        online = OnlineFit(prior=prior)
        for shape, elapsed_ns in samples:
            online.add(shape, elapsed_ns)
        return online.fit(name)

    @classmethod
    def like(cls, other: CostModel, *, max_tokens: int = 8192) -> "FittedCostModel":
        """What another model says of common steps: decode batches, chunks, and both together."""
        samples: list[tuple[StepShape, Ns]] = []
        contexts = (64, 1024, 4096, 16_384)
        for num_prompt in (
            0,
            *(n for n in (16, 64, 256, 512, 1024, 2048, 4096, 8192) if n <= max_tokens),
        ):
            for num_seqs in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256):
                for context in contexts if num_seqs else contexts[:1]:
                    if num_prompt + num_seqs:
                        shape = _mixed(num_prompt, num_seqs, context)
                        samples.append((shape, other.step_ns(shape)))
        return cls.fit(samples, name="like another model")

    def with_link(self, name: str, link: Link) -> "FittedCostModel":
        return msgspec.structs.replace(self, links={**self.links, name: link})

    def slower(self, factor: float) -> "FittedCostModel":
        """The same on a machine whose steps take so many times as long."""
        return msgspec.structs.replace(
            self,
            knot_ns=tuple(factor * cost for cost in self.knot_ns),
            seq_ns=factor * self.seq_ns,
            logit_row_ns=factor * self.logit_row_ns,
            attention_pair_ns=factor * self.attention_pair_ns,
            kv_token_ns=factor * self.kv_token_ns,
        )

    def residuals(self, samples: Iterable[tuple[StepShape, Ns]]) -> FitError:
        """How far the predictions are off. Raises ValueError without samples."""
        signed = [self.step_ns(shape) / max(1, actual) - 1.0 for shape, actual in samples]
        if not signed:
            raise ValueError("no samples to compare with")
        errors = sorted(map(abs, signed))
        return FitError(
            num_samples=len(errors),
            mean=sum(errors) / len(errors),
            bias=sum(signed) / len(signed),
            p50=percentile(errors, 0.5),
            p90=percentile(errors, 0.9),
            max=errors[-1],
        )

    @classmethod
    def _from_coefficients(
        cls, name: str, coefficients: list[float], links: dict[str, Link]
    ) -> "FittedCostModel":
        first, *slopes, seq, logit_row, pair, kv_token = coefficients
        rises = (slope * (b - a) for slope, (a, b) in zip(slopes, pairwise(KNOTS), strict=True))
        return cls(
            name=name,
            knot_ns=tuple(accumulate(rises, initial=first)),
            seq_ns=seq,
            logit_row_ns=logit_row,
            attention_pair_ns=pair,
            kv_token_ns=kv_token,
            links=links,
        )

    def _coefficients(self) -> list[float]:
        slopes = [
            (end - start) / (b - a)
            for (start, end), (a, b) in zip(pairwise(self.knot_ns), pairwise(KNOTS), strict=True)
        ]
        rest = (self.seq_ns, self.logit_row_ns, self.attention_pair_ns, self.kv_token_ns)
        return [self.knot_ns[0], *slopes, *rest]


def formula_of(cost: CostModel) -> KnotFormula | None:
    return cost.formula if isinstance(cost, FittedCostModel) else None


class OnlineFit:
    """Folds recorded steps in one by one, in bounded memory, and fits when asked.

    With `half_life`, a sample counts half after that many more, so that the fit follows a machine
    that becomes slower or faster.
    """

    def __init__(
        self, *, prior: FittedCostModel | None = None, half_life: int | None = None
    ) -> None:
        self._prior = prior or FittedCostModel.prior()
        self._sums = StepSums(half_life)

    @property
    def num_samples(self) -> int:
        return self._sums.num_samples

    @property
    def largest(self) -> StepShape:
        """Each figure by itself."""
        return StepShape(*self._sums.largest)

    def add(self, shape: StepShape, elapsed_ns: Ns, scale_ns: Ns | None = None) -> None:
        """The error counts relative to `scale_ns` where that is given (see NormalEquations.add)."""
        self._sums.add(msgspec.structs.astuple(shape), elapsed_ns, scale_ns)

    def fit(self, name: str = "fitted online") -> FittedCostModel:
        if not self.num_samples:
            return self._prior
        # A cost of 0 has no proportion that samples could scale.
        prior = [max(cost, 1e-6) for cost in self._prior._coefficients()]
        coefficients = self._sums.equations.solve(prior, SLOPES)
        model = FittedCostModel._from_coefficients(name, coefficients, self._prior.links)
        return msgspec.structs.replace(model, num_samples=self.num_samples, largest=self.largest)


def _mixed(num_prompt: int, num_seqs: int, context: int) -> StepShape:
    """A prompt from its beginning, beside sequences that decode."""
    num_kv = num_seqs * context
    has_prompt = int(num_prompt > 0)
    return StepShape(
        num_prompt + num_seqs,
        num_seqs + has_prompt,
        num_seqs + has_prompt,
        num_kv + num_prompt * (num_prompt + 1) // 2,
        num_kv + num_prompt,
    )
