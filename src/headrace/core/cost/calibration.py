"""What was measured of one machine that serves: what steps take, and what passes around them.

Decides how recorded times become figures, and which predictions leave what was seen; refuses to
know where records come from.
"""

import sys
from collections.abc import Sequence
from math import fsum
from typing import Final

import msgspec

from headrace.core.base.plan import WorkerSpec
from headrace.core.base.types import Ns
from headrace.core.config.schema import WorkerConfig
from headrace.core.cost.fitted import FittedCostModel, Link
from headrace.core.cost.limits import (
    MAX_WORKERS,
    fault_of_cost,
    fault_of_link,
    fault_of_shape,
    fault_of_worker,
    outside,
)
from headrace.core.cost.model import StepShape

FORMAT: Final = "hrcost1"
MAX_RESIDUALS: Final = 4096  # of a kind, in a file
LARGE_STEP_TOKENS: Final = 16  # from here on a step keeps all cores busy, and has to share them all


class Line(msgspec.Struct, frozen=True):
    """A time that grows with a number."""

    fixed_ns: float = 0.0
    each_ns: float = 0.0

    def at(self, number: int) -> Ns:
        return Ns(round(self.fixed_ns + self.each_ns * number))

    @classmethod
    def fit(cls, points: Sequence[tuple[int, float]]) -> "Line":
        """Least squares; flat where numbers do not differ, or more would cost less."""
        if not points:
            return cls()
        mean_x = fsum(x for x, _ in points) / len(points)
        mean_y = fsum(y for _, y in points) / len(points)
        spread = fsum((x - mean_x) ** 2 for x, _ in points)
        joint = fsum((x - mean_x) * (y - mean_y) for x, y in points)
        slope = max(0.0, joint / spread) if spread else 0.0
        if mean_y - slope * mean_x < 0.0:
            return cls(0.0, max(0.0, mean_y / mean_x))
        return cls(mean_y - slope * mean_x, slope)


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What passes outside of steps, in a request's life."""

    request: Line = Line()  # sent by the client (or come, where it told nothing) to the engine
    server: Line = Line()  # of that, from the moment at which the server has it
    first_token_ns: float = 0.0  # from the engine's word to the client, its headers before it
    token_ns: float = 0.0  # the same of later tokens
    has_client: bool = False  # whether clients told their times


class SeenShapes(msgspec.Struct, frozen=True):
    """The largest figures of fitted steps; beyond them predictions extrapolate."""

    largest: StepShape
    num_workers: int  # in a step at the same time


class Residuals(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as long as predicted steps took, in runs of neighbours: the system holds up
    several in a row. Each list has a mean of 1.
    """

    run_steps: int = 1  # of each run; the lists are whole runs, one after another
    decode: tuple[float, ...] = ()  # of steps that only decode
    mixed: tuple[float, ...] = ()  # of all others

    def __bool__(self) -> bool:
        return bool(self.decode or self.mixed)

    def of(self, shape: StepShape) -> tuple[float, ...]:
        """Those of its kind; none = it takes what is predicted."""
        return self.mixed if shape.num_tokens > shape.num_seqs else self.decode


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of steps that the fit had not seen."""

    num_steps: int
    mean: float
    p50: float
    p95: float
    bias: float  # of all time together, with its sign


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cost model with all that a simulation of the same machine asks. The file's content."""

    format: str = FORMAT
    headrace_version: str
    machine: str  # in words
    num_workers: int  # that shared the machine
    source: str
    config: WorkerConfig
    spec: WorkerSpec
    steps: FittedCostModel  # alone on the machine, the driver's time included
    believed: FittedCostModel  # what workers knew of themselves at the start
    host_share: float  # of steps' time outside the executor
    host: Host
    # By how many workers are in a step; the first is 1. Of large steps, where it is another.
    slow_down: tuple[float, ...]
    slow_down_large: tuple[float, ...] = ()
    kv_link: Link | None = None  # of KV, by blocks; None = too few copies were seen
    seen: SeenShapes
    held_out: HeldOut
    residuals: Residuals = Residuals()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format is {self.format!r}, expected {FORMAT!r}")
        slow_downs = (*self.slow_down, *self.slow_down_large)
        if self.slow_down_large and len(self.slow_down_large) != len(self.slow_down):
            raise ValueError("slow_down_large must have as many figures as slow_down")
        if not self.slow_down or any(not 0.01 <= one <= 1000.0 for one in slow_downs):
            raise ValueError("slow_down must have figures between 0.01 and 1000")
        if fault := self._fault():
            raise ValueError(fault)
        host = self.host
        lines = (*msgspec.structs.astuple(host.request), *msgspec.structs.astuple(host.server))
        times = (*lines, host.first_token_ns, host.token_ns)
        if any(not 0.0 <= time <= 1e12 for time in times):
            raise ValueError("times of the host must be between 0 and 1e12 ns")

    def _fault(self) -> str:
        return (
            outside("num_workers", self.num_workers, 1, MAX_WORKERS)
            or fault_of_worker(self.spec, self.config, self.steps)
            or fault_of_cost(self.believed)
            or (fault_of_link(self.kv_link) if self.kv_link else "")
            or outside("num_workers of what was seen", self.seen.num_workers, 1, MAX_WORKERS)
            or fault_of_shape(self.seen.largest)
            or outside("num_steps held out", self.held_out.num_steps, 0, sys.maxsize)
            or outside("mean error", self.held_out.mean, 0.0, 1e9)
            or outside("p95 of errors", self.held_out.p95, 0.0, 1e9)
            or outside("bias", self.held_out.bias, -1.0, 1e9)
            or outside("host_share", self.host_share, 0.0, 1.0)
            or outside("run_steps of residuals", self.residuals.run_steps, 1, MAX_RESIDUALS)
            or _fault_of_residuals(self.residuals.decode)
            or _fault_of_residuals(self.residuals.mixed)
        )


def _fault_of_residuals(ratios: Sequence[float]) -> str:
    faults = (outside("a residual", ratio, 0.001, 1000.0) for ratio in ratios)
    return outside("number of residuals", len(ratios), 0, MAX_RESIDUALS) or next(
        filter(None, faults), ""
    )
