"""How near engines come to data sheets: constants fitted to public measurements.

engines.json is written by tests/support/fit_engines.py. Errors are relative errors of TPOT, and
those that count are of whole configurations that the fit had not seen.
"""

from functools import cache
from importlib.resources import files

import msgspec

from headrace.core.cost.datasheet import DataSheetCostModel
from headrace.core.cost.hardware import BYTES_BY_DTYPE, IDEAL, Efficiency
from headrace.plan.presets import find


class TpotError(msgspec.Struct, frozen=True):
    """Absolute relative errors |predicted / measured - 1|."""

    mean: float
    median: float
    p90: float


class SeenRange(msgspec.Struct, frozen=True, kw_only=True):
    """What a fit rests on; everything else is extrapolation."""

    models: tuple[str, ...]
    accelerators: tuple[str, ...]
    weights: tuple[str, ...]
    tp: tuple[int, ...]
    max_concurrency: float
    max_context_tokens: float


class MoeError(msgspec.Struct, frozen=True):
    num_points: int
    mean: float
    median: float
    p90: float


class RankOrder(msgspec.Struct, frozen=True):
    """Spearman's correlation of tokens per second and device, over groups of loads."""

    num_groups: int
    min: float
    median: float


class EngineFit(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of one engine, and how far to trust them."""

    engine: str
    efficiency: Efficiency
    interference_share: float
    quantised_kv_dtype: str  # of 8- and 4-bit checkpoints, in the points that were fitted
    num_points: int
    num_series: int
    in_sample: TpotError
    series_held_out: TpotError
    families_held_out: TpotError
    order_of_throughput: RankOrder
    moe_not_fitted: dict[str, MoeError]
    seen: SeenRange
    source: str


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prediction's numbers come from."""

    kind: str  # "data sheet", "fitted" or "counted"
    sources: tuple[str, ...]
    extrapolates: tuple[str, ...] = ()  # every way in which it leaves what was seen


@cache
def engine_fits() -> dict[str, EngineFit]:
    text = (files("headrace.plan") / "data" / "engines.json").read_bytes()
    return {fit.engine: fit for fit in msgspec.json.decode(text, type=list[EngineFit])}


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that somebody asks about; without a fit, the data sheet itself."""

    name: str = "ideal"
    fit: EngineFit | None = None

    @classmethod
    def named(cls, name: str) -> "Engine":
        """ "ideal" or a fitted engine; raises ConfigError that names what comes near."""
        return find(
            "engine",
            name,
            {"ideal": cls()} | {key: cls(name=key, fit=fit) for key, fit in engine_fits().items()},
        )

    @property
    def efficiency(self) -> Efficiency:
        if self.fit is None:
            return IDEAL
        error = self.fit.series_held_out.mean
        source = (
            f"fitted to {self.fit.num_points} public points, TPOT off by {error:.1%} on average"
        )
        return msgspec.structs.replace(self.fit.efficiency, source=source)

    @property
    def interference_share(self) -> float:
        """All of a prompt's work, where nothing was fitted."""
        return 1.0 if self.fit is None else self.fit.interference_share

    def kv_dtype(self, weight_dtype: str) -> str:
        """What the engine keeps for such a checkpoint, as far as the fit knows it."""
        is_quantised = BYTES_BY_DTYPE.get(weight_dtype, 2.0) < 2.0
        return self.fit.quantised_kv_dtype if self.fit and is_quantised else "bf16"

    def provenance(
        self, cost: DataSheetCostModel, *, concurrency: float, context_tokens: float
    ) -> Provenance:
        accelerator, model = cost.accelerator, cost.model
        sheets = (f"{accelerator.name}: {accelerator.source}", f"{model.name}: {model.source}")
        if self.fit is None:
            return Provenance(kind="data sheet", sources=(*sheets, cost.efficiency.source))
        sources = (*sheets, f"{self.name}: {cost.efficiency.source} ({self.fit.source})")
        seen = self.fit.seen
        beyond = []
        if cost.model.num_experts:
            beyond.append("experts: dense models were fitted")
        elif cost.model.name not in seen.models:
            beyond.append(f"model {cost.model.name}: seen {', '.join(seen.models)}")
        if cost.accelerator.name not in seen.accelerators:
            names = ", ".join(seen.accelerators)
            beyond.append(f"accelerator {cost.accelerator.name}: seen {names}")
        if cost.weight_dtype not in seen.weights:
            beyond.append(f"{cost.weight_dtype} weights: seen {', '.join(seen.weights)}")
        if cost.layout.tp not in seen.tp or cost.layout.pp > 1:
            beyond.append(f"{cost.layout}: seen TP {', '.join(map(str, seen.tp))}")
        if concurrency > seen.max_concurrency:
            beyond.append(f"{concurrency:g} sequences: seen up to {seen.max_concurrency:g}")
        if context_tokens > seen.max_context_tokens:
            limit = seen.max_context_tokens
            beyond.append(f"contexts of {context_tokens:g} tokens: seen up to {limit:g}")
        return Provenance(kind="fitted", sources=sources, extrapolates=tuple(beyond))
