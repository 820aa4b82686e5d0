"""Fits the efficiencies of engines to measured points, and writes plan/data/engines.json.

    python tests/support/fit_engines.py hardware_points.csv

Per engine, over dense models: least absolute relative error of TPOT by Levenberg and Marquardt's
method with reweighting, pulled towards a prior. The error that is reported is that of whole
configurations held out: five folds over series (model, accelerator, weights, TP, lengths), and
once more over families (model, accelerator, weights), which asks for a device or a model never
seen.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import correlation, median

import msgspec
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from headrace.core.cost.hardware import Efficiency
from headrace.plan.steps import ClosedLoop
from support.hardware_points import QUANTISED_KV, RESERVED_BYTES, Point, read_points

Floats = npt.NDArray[np.float64]

ENGINES_FILE = Path(__file__).parents[2] / "src/headrace/plan/data/engines.json"
NUM_FOLDS = 5
PRIOR_WEIGHT = 0.3  # of a squared distance, against errors of 1.0
LEAST_GROUP = 4  # points, of a group whose order is judged
LEAST_ERROR = 0.03  # below it, errors count squared
STEP_NS = 300_000.0  # of a step on the host; the points do not tell it from the layers' overhead
SHARES = ("memory_share", "flop_share", "link_share", "interference_share")
TIMES = ("layer_ns", "collective_ns", "seq_ns")
PRIOR = {
    "memory_share": 0.8,
    "flop_share": 0.6,
    "link_share": 0.5,
    "interference_share": 0.8,
    "layer_ns": 20_000.0,
    "collective_ns": 5_000.0,
    "seq_ns": 20_000.0,
}


def start() -> Floats:
    """The prior, where every real number is a legal value: shares by logit, times by logarithm."""
    shares = np.array([PRIOR[name] for name in SHARES])
    times = np.array([PRIOR[name] for name in TIMES])
    return np.concatenate([np.log(shares / (1 - shares)), np.log(times)])


def constants(at: Floats) -> dict[str, float]:
    shares = 1 / (1 + np.exp(-at[: len(SHARES)]))
    values = [*shares, *np.exp(at[len(SHARES) :])]
    return dict(zip((*SHARES, *TIMES), map(float, values), strict=True))


def efficiency_at(at: Floats) -> tuple[Efficiency, float]:
    """With the share of interference."""
    values = constants(at)
    interference_share = values.pop("interference_share")
    return msgspec.convert({"step_ns": STEP_NS, **values}, Efficiency), interference_share


def predict(points: Sequence[Point], at: Floats) -> list[ClosedLoop]:
    efficiency, interference_share = efficiency_at(at)
    return [p.predicted(efficiency, interference_share) for p in points]


def errors(points: Sequence[Point], at: Floats) -> Floats:
    """Relative errors of TPOT, predicted to measured."""
    predicted = np.array([found.tpot_ns / 1e6 for found in predict(points, at)])
    measured: Floats = np.array([p.tpot_ms for p in points])
    return np.asarray(predicted / measured - 1)


def fit(points: Sequence[Point]) -> Floats:
    def residuals(at: Floats) -> Floats:
        return np.log1p(errors(points, at))

    def value(at: Floats, residual: Floats) -> float:
        return float(np.abs(residual).sum() + PRIOR_WEIGHT * ((at - prior) ** 2).sum())

    prior = at = start()
    size, damping = len(at), 1e-2
    residual = residuals(at)
    best = value(at, residual)
    for _ in range(40):
        weight = 1 / np.maximum(np.abs(residual), LEAST_ERROR)
        moved = [residuals(at + 1e-4 * unit) - residual for unit in np.eye(size)]
        jacobian = np.stack(moved, axis=1) / 1e-4
        normal = jacobian.T @ (jacobian * weight[:, None]) + 2 * PRIOR_WEIGHT * np.eye(size)
        slope = jacobian.T @ (weight * residual) + 2 * PRIOR_WEIGHT * (at - prior)
        gain = 0.0
        while damping < 1e6 and gain <= 0:
            change = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
            tried = at + np.clip(change, -1, 1)
            residual_there = residuals(tried)
            gain = best - value(tried, residual_there)
            damping *= 4 if gain <= 0 else 0.25
        if gain <= 1e-4 * best:
            break
        at, residual, best = tried, residual_there, best - gain
    return at


def folds(
    points: Sequence[Point], group: Callable[[Point], object]
) -> Iterator[tuple[Floats, list[int]]]:
    """A fit, and the places of the points of whose groups it has seen nothing."""
    groups = sorted({group(p) for p in points}, key=repr)
    Random(0).shuffle(groups)
    fold = {g: place % min(NUM_FOLDS, len(groups)) for place, g in enumerate(groups)}
    for held in sorted(set(fold.values())):
        at = fit([p for p in points if fold[group(p)] != held])
        yield at, [place for place, p in enumerate(points) if fold[group(p)] == held]


def held_out(points: Sequence[Point], group: Callable[[Point], object]) -> Floats:
    """Absolute errors of every point, predicted by a fit that has seen nothing of its group."""
    found = np.zeros(len(points))
    for at, places in folds(points, group):
        found[places] = np.abs(errors([points[place] for place in places], at))
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """From the least; ties are broken by order, which the figures here hardly have."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(place)) for place in range(len(values))]


def order_of(points: Sequence[Point], at: Floats) -> dict[str, float]:
    """Spearman's rank correlation of tokens per second and device, within each group of loads that
    an operator would choose among: same engine, model, accelerator, weights and lengths.
    """
    rates = [
        found.output_tokens_per_s / p.tp
        for p, found in zip(points, predict(points, at), strict=True)
    ]
    groups: dict[object, list[tuple[float, float]]] = {}
    for p, rate in zip(points, rates, strict=True):
        key = (*p.family, p.prompt_tokens, p.output_tokens)
        groups.setdefault(key, []).append((rate, p.tok_s_per_gpu))
    found = [
        correlation(*map(ranks, zip(*pairs, strict=True)))
        for pairs in groups.values()
        if len(pairs) >= LEAST_GROUP
    ]
    return {
        "num_groups": len(found),
        "min": round(min(found), 4),
        "median": round(median(found), 4),
    }


def range_of(points: Sequence[Point]) -> dict[str, object]:
    """What a fit has seen: beyond it, it extrapolates."""
    contexts = [p.prompt_tokens + p.output_tokens / 2 for p in points]
    return {
        "models": sorted({p.model for p in points}),
        "accelerators": sorted({p.gpu for p in points}),
        "weights": sorted({p.weights for p in points}),
        "tp": sorted({p.tp for p in points}),
        "max_concurrency": max(p.concurrency for p in points),
        "max_context_tokens": max(contexts),
    }


def errors_of(absolute: Floats) -> dict[str, float]:
    return {
        "mean": round(float(absolute.mean()), 4),
        "median": round(float(np.median(absolute)), 4),
        "p90": round(float(np.quantile(absolute, 0.9)), 4),
    }


def describe(engine: str, points: Sequence[Point]) -> dict[str, object]:
    dense = [p for p in points if p.engine == engine and not p.is_moe]
    at = fit(dense)
    values = {name: float(f"{value:.4g}") for name, value in constants(at).items()}
    moe: dict[str, object] = {}
    for model in sorted({p.model for p in points if p.engine == engine and p.is_moe}):
        theirs = [p for p in points if p.engine == engine and p.model == model]
        moe[model] = {"num_points": len(theirs), **errors_of(np.abs(errors(theirs, at)))}
    return {
        "engine": engine,
        "interference_share": values.pop("interference_share"),
        "efficiency": {
            "step_ns": STEP_NS,
            "reserved_bytes": RESERVED_BYTES.get(engine, 0.0),
            **values,
        },
        "quantised_kv_dtype": QUANTISED_KV[engine],
        "num_points": len(dense),
        "num_series": len({p.series for p in dense}),
        "in_sample": errors_of(np.abs(errors(dense, at))),
        "series_held_out": errors_of(held_out(dense, lambda p: p.series)),
        "families_held_out": errors_of(held_out(dense, lambda p: p.family)),
        "order_of_throughput": order_of(dense, at),
        "moe_not_fitted": moe,
        "seen": range_of(dense),
        "source": "silicon_sample.csv of github ai-dynamo/aiconfigurator, Apache-2.0",
    }


def main(file: str) -> None:
    points = list(read_points(Path(file)))
    fits = [describe(engine, points) for engine in QUANTISED_KV]
    ENGINES_FILE.write_text(json.dumps(fits, indent=2) + "\n", encoding="utf-8")
    for found in fits:
        kinds = ("in_sample", "series_held_out", "families_held_out")
        print(found["engine"], found["num_points"], {kind: found[kind] for kind in kinds})


if __name__ == "__main__":
    main(sys.argv[1])
