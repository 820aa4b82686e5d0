"""A fit finds what steps cost and how workers slow each other down, where both are known."""

from functools import partial
from random import Random
from statistics import fmean, pstdev

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.cost.contention import TimedStep, fit_steps, times_by_company
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import StepShape
from headrace.sim.cores import SharedCores
from headrace.sim.runtime import SimRuntime

TRUTH = FittedCostModel(
    name="truth",
    knot_ns=(9e6, 10e6, 12e6, 16e6, 24e6, 44e6, 90e6, 170e6, 320e6, 620e6, 1220e6),
    seq_ns=3e4,
    logit_row_ns=2e5,
    attention_pair_ns=800.0,
    kv_token_ns=2000.0,
)
SLOW_DOWN, SLOW_DOWN_LARGE = (1.0, 1.6, 2.3), (1.0, 1.9, 2.8)


def shape_of(rng: Random) -> StepShape:
    if rng.random() < 0.6:
        n = rng.choice((1, 2, 3, 4, 6, 8, 12, 16))
        kv = n * rng.randrange(20, 900)
        return StepShape(n, n, n, kv, kv)
    num_decoding, chunk = rng.randrange(0, 6), rng.choice((16, 24, 32, 60, 128, 250, 500))
    kv, start = num_decoding * rng.randrange(20, 600), rng.randrange(0, 600)
    pairs = kv + chunk * start + chunk * chunk // 2
    seqs = num_decoding + 1
    return StepShape(chunk + num_decoding, seqs, seqs, pairs, kv + start + chunk)


def work(num_workers: int, noise: float, num_steps: int) -> list[TimedStep]:
    """Workers that are in a step, or pause, on cores that they share."""
    rng, runtime = Random(1), SimRuntime()
    cores = SharedCores(SLOW_DOWN, runtime, slow_down_large=SLOW_DOWN_LARGE)
    done: list[TimedStep] = []

    def begin(worker: int) -> None:
        shape = shape_of(rng)
        work_ns = Ns(round(TRUTH.step_ns(shape) * max(0.3, rng.gauss(1.0, noise))))
        cores.start(worker, work_ns, partial(end, worker, shape, runtime.now), shape.num_tokens)

    def end(worker: int, shape: StepShape, begin_ns: Ns) -> None:
        took_ns = runtime.now - begin_ns
        done.append(
            TimedStep(
                worker=worker,
                begin_ns=begin_ns,
                end_ns=runtime.now,
                device_ns=Ns(round(took_ns * 0.97)),
                shape=shape,
            )
        )
        if len(done) < num_steps:
            pause_s = rng.expovariate(4.0) if rng.random() < 0.5 else 0.0
            runtime.call_later(Ns(round(pause_s * NS_PER_S)), partial(begin, worker))

    for worker in range(num_workers):
        begin(worker)
    runtime.run(max_calls=100_000)
    return done


def common_shapes() -> list[StepShape]:
    return [
        StepShape(1, 1, 1, 200, 200),
        StepShape(4, 4, 4, 1200, 1200),
        StepShape(30, 4, 4, 5000, 900),
        StepShape(250, 1, 1, 31_000, 250),
        StepShape(500, 1, 1, 125_000, 500),
    ]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_costs_and_slow_down_are_found_under_noise(num_workers: int) -> None:
    steps = work(num_workers, noise=0.15, num_steps=500 * num_workers)
    found = fit_steps(steps)
    for shape in common_shapes():
        assert found.cost.step_ns(shape) == pytest.approx(TRUTH.step_ns(shape), rel=0.08)
    assert found.slow_down == pytest.approx(SLOW_DOWN[:num_workers], rel=0.08)
    large = pytest.approx(SLOW_DOWN_LARGE[:num_workers], rel=0.08)
    assert found.slow_down_large == large
    assert found.host_share == pytest.approx(0.03, abs=0.002)
    # The noise itself, no more, and no side is favoured.
    assert 0.08 < found.held_out.mean < 0.17
    assert abs(found.held_out.bias) < 0.05
    assert found.held_out.p50 < found.held_out.p95
    assert found.held_out.num_steps == -(-len(steps) // 5)
    assert found.seen.largest.num_tokens == max(step.shape.num_tokens for step in steps)
    assert found.seen.num_workers == num_workers


def test_residuals_are_the_noise_with_a_mean_of_one() -> None:
    found = fit_steps(work(2, noise=0.15, num_steps=1000)).residuals
    for ratios in (found.decode, found.mixed):
        assert len(ratios) > 200
        assert len(ratios) % found.run_steps == 0
        assert fmean(ratios) == pytest.approx(1.0, abs=1e-3)
        assert 0.12 < pstdev(ratios) < 0.2
    quiet = fit_steps(work(1, noise=0.0, num_steps=60)).residuals
    assert pstdev([*quiet.decode, *quiet.mixed, 1.0]) < 0.03


def test_company_is_counted_by_time() -> None:
    shape = StepShape(1, 1, 1, 1, 1)

    def step(worker: int, begin: int, end: int) -> TimedStep:
        return TimedStep(
            worker=worker,
            begin_ns=Ns(begin),
            end_ns=Ns(end),
            device_ns=Ns(end - begin),
            shape=shape,
        )

    # The first worker's second step begins when its first one ends: they are no company.
    found = times_by_company([step(0, 0, 10), step(0, 10, 20), step(1, 5, 30)])
    assert found == [[5, 5], [0, 10], [10, 15]]


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 3 steps, and a fit needs 50"):
        fit_steps(work(1, noise=0.0, num_steps=3))
