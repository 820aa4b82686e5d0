"""TTFT of measured points, by simulating the client that measured them, with costs of whole
configurations held out.

    PYTHONPATH=src:tests python -m support.closed_loop_ttft hardware_points.csv [number [engine]]

A sweep's client has as many requests under way as its concurrency, begins with all of them at
once, and asks ten rounds of them, whose lengths are even between 0.8 and 1.0 of the longest. Three
rounds are simulated: those after the first are alike. `number` takes as many points of each
engine and kind of model, by chance. Left out are rounds of more than 65,536 output tokens.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_MS, SeqId
from headrace.core.cost.hardware import Efficiency
from headrace.core.telemetry import RequestRecord
from headrace.core.workload.closed_loop import ClosedLoop
from headrace.core.workload.source import Listed
from headrace.core.workload.tokens import TokenBook
from headrace.plan.engines import Engine
from headrace.sim.capacity import Crew, serve
from headrace.sim.setup import VOCAB, Device
from support.fit_engines import Floats, efficiency_at, errors_of, folds
from support.hardware_points import QUANTISED_KV, Point, read_points

NUM_ROUNDS = 10
SIMULATED_ROUNDS = 3
LEAST_SHARE = 0.8
STEP_TOKENS = 8192  # of vLLM and SGLang on such devices, and of the sweep's own flags
BLOCK_SIZE = 64
MOST_TOKENS = 65_536  # of a round's answers; of long answers by many clients little is waited for
# It lets nobody decode while prompts wait, so that who begins together ends together: where all
# lengths are equal, each round is as the first.
KEEPS_ROUNDS = "sglang"


def simulated_ms(point: Point, efficiency: Efficiency) -> float:
    """The mean TTFT from the engine's door on. Raises ConfigError where nothing fits."""
    device = Device.of_data_sheet(point.cost(efficiency), block_size=BLOCK_SIZE)
    num_clients = int(point.concurrency)
    is_one_round = point.engine == KEEPS_ROUNDS and not point.draws_lengths
    least_share = 1.0 if is_one_round else LEAST_SHARE
    longest = 2.0 / (1.0 + least_share)  # of the mean
    requests = drawn(
        num_clients * (1 if is_one_round else SIMULATED_ROUNDS),
        round(point.prompt_tokens * longest),
        round(point.output_tokens * longest),
        least_share,
    )
    crew = Crew(device=device, num_workers=1, step_tokens=STEP_TOKENS, max_seqs=num_clients)
    first_ms: list[float] = []
    later_ms: list[float] = []

    def note(record: RequestRecord) -> None:
        if record.ttft_ns is not None:
            part = first_ms if record.seq_id < num_clients else later_ms
            part.append(record.ttft_ns / NS_PER_MS)

    serve([crew], ClosedLoop(Listed(requests), num_clients), slo=Slo(), on_record=note)
    if is_one_round:
        return mean(first_ms)
    return mean(first_ms) / NUM_ROUNDS + mean(later_ms) * (1 - 1 / NUM_ROUNDS)


def drawn(num: int, prompt: int, output: int, least_share: float) -> Iterator[SeqSpec]:
    """Requests that share nothing, of lengths between a share of these and all of them."""
    rng, book = Random(0), TokenBook(VOCAB)
    for number in range(num):
        num_prompt, num_output = (
            round(longest * rng.uniform(least_share, 1.0)) for longest in (prompt, output)
        )
        yield SeqSpec(
            seq_id=SeqId(number),
            request_id=str(number),
            prompt_tokens=book.text(number, num_prompt),
            params=SamplingParams(max_tokens=max(1, num_output), ignore_eos=True),
        )


def host_ms(measured: Floats, simulated: Floats) -> float:
    """What passes outside of steps, tokenising and HTTP: the constant of least relative error."""
    order = np.argsort(measured - simulated)
    weight = np.cumsum(1 / measured[order])
    place = int(np.searchsorted(weight, weight[-1] / 2))
    return max(0.0, float((measured - simulated)[order][place]))


def held_out_ms(points: Sequence[Point]) -> Floats:
    """Predicted with constants, of steps and outside of them, from other configurations."""
    measured = np.array([p.ttft_ms for p in points])
    simulated = np.zeros(len(points))
    parts: list[list[int]] = []
    for at, places in folds(points, lambda p: p.series):
        efficiency, _ = efficiency_at(at)
        parts.append(places)
        simulated[places] = [simulated_ms(points[place], efficiency) for place in places]
    predicted = simulated.copy()
    for places in parts:
        others = np.setdiff1d(np.arange(len(points)), places)
        predicted[places] += host_ms(measured[others], simulated[others])
    return predicted


def by_dense_ms(points: Sequence[Point], engine: str, outside_ms: float) -> Floats:
    efficiency = Engine.named(engine).efficiency
    return np.array([simulated_ms(p, efficiency) + outside_ms for p in points])


def that_fit(points: Sequence[Point], engine: str) -> Iterator[Point]:
    """Of every cost that may be asked for, since a fit of other points changes no memory."""
    efficiency = Engine.named(engine).efficiency
    for point in points:
        try:
            Device.of_data_sheet(point.cost(efficiency), block_size=BLOCK_SIZE)
        except ConfigError:
            continue
        yield point


def report(name: str, points: Sequence[Point], predicted: Floats) -> None:
    measured = np.array([p.ttft_ms for p in points])
    off = predicted / measured - 1
    print(f"{name}: {len(points)} points, {errors_of(np.abs(off))}, bias {np.median(off):+.2f}")
    loads = sorted({(p.model, p.draws_lengths, p.prompt_tokens, p.output_tokens) for p in points})
    for load in loads:
        places = [
            place
            for place, p in enumerate(points)
            if (p.model, p.draws_lengths, p.prompt_tokens, p.output_tokens) == load
        ]
        part = off[places]
        model, _, prompt, output = load
        print(
            f"    {model} {prompt:.0f}/{output:.0f}: {len(places)}, "
            f"mean {np.abs(part).mean():.1%}, "
            f"median {np.median(np.abs(part)):.1%}, bias {np.median(part):+.1%}",
            flush=True,
        )


def soon_simulated(points: Sequence[Point]) -> list[Point]:
    return [p for p in points if p.concurrency * p.output_tokens <= MOST_TOKENS]


def some(points: Sequence[Point], number: int) -> list[Point]:
    return Random(0).sample(points, min(number or len(points), len(points)))


def main(file: str, number: int = 0, engines: Sequence[str] = tuple(QUANTISED_KV)) -> None:
    points = [p for p in read_points(Path(file)) if p.ttft_ms]
    for engine in engines:
        theirs = list(that_fit(soon_simulated([p for p in points if p.engine == engine]), engine))
        dense = some([p for p in theirs if not p.is_moe], number)
        predicted = held_out_ms(dense)
        report(engine, dense, predicted)
        efficiency = Engine.named(engine).efficiency
        measured = np.array([p.ttft_ms for p in dense])
        outside_ms = host_ms(measured, np.array([simulated_ms(p, efficiency) for p in dense]))
        print(f"    outside of steps: {outside_ms:.0f} ms")
        experts = some([p for p in theirs if p.is_moe], number)
        report(f"{engine}, experts", experts, by_dense_ms(experts, engine, outside_ms))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 0, sys.argv[3:] or tuple(QUANTISED_KV))
