"""Short requests beside prompts of 8,192 tokens: what the budget and the lanes are for.

60 requests of 32 to 255 prompt tokens and 32 output tokens arrive at random, 0.8 a second; three
prompts of 8,192 tokens come after 2, 3 and 40 s. Steps take 1.5 times what the cost model guesses
before it learns: the device is slower than it is taken for. With seed 1:

    policy                      short TTFT p50, p95    ITL p90, p99, longest         long TTFT
    fixed budget, one lane      11.2 s, 35.3 s         1,560 ms, 1,977 ms, 2,158 ms  21, 27, 40 s
    `itl` budget, two lanes     0.2 s, 0.4 s           45 ms, 61 ms, 65 ms           49, 51, 60 s

The target is 50 ms with a margin of a tenth. It is exceeded only where two sequences of 8,192
tokens decode beside the least that prefill gets.
"""

import sys
from dataclasses import dataclass
from random import Random
from statistics import fmean

import msgspec
import pytest

from headrace.adapters.executors.sim import FakeSteps
from headrace.core.base.events import Arrive, Cancel, Emit, EngineEffect, EngineEvent
from headrace.core.base.metrics import percentile
from headrace.core.base.plan import WorkerSpec
from headrace.core.base.request import SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, SeqId
from headrace.core.config.schema import SchedulerConfig, WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.sim.world import WorkerSetup, World, simulate
from support.seeds import FEW_AND_A_THOUSAND

NUM_SHORT, VOCAB = 60, 1000
SPEC = WorkerSpec(
    model_digest="00",
    kv_dtype="bf16",
    block_size=16,
    num_blocks=8192,
    max_model_len=110_000,
    vocab_size=VOCAB,
)
GUESS = FittedCostModel.prior()
TRUTH = msgspec.structs.replace(
    GUESS,
    knot_ns=tuple(1.5 * cost for cost in GUESS.knot_ns),
    seq_ns=1.5 * GUESS.seq_ns,
    logit_row_ns=1.5 * GUESS.logit_row_ns,
    attention_pair_ns=1.5 * GUESS.attention_pair_ns,
    kv_token_ns=1.5 * GUESS.kv_token_ns,
)


@dataclass(frozen=True)
class Outcome:
    """Milliseconds, sorted."""

    short_ttft_ms: list[float]
    long_ttft_ms: list[float]
    gaps_ms: list[float]
    trace_hash: str


Long = tuple[tuple[float, int], ...]  # seconds and tokens
THREE: Long = ((2, 8192), (3, 8192), (40, 8192))


def arrivals(seed: int, long: Long) -> list[tuple[Ns, Arrive]]:
    rng = Random(seed)
    at_s, inputs = 0.0, list[tuple[Ns, Arrive]]()
    for seq_id in range(NUM_SHORT):
        at_s += rng.expovariate(0.8)
        inputs.append(arrival(rng, seq_id, at_s, rng.randrange(32, 256)))
    for seq_id, (at_s, num_prompt) in enumerate(long, NUM_SHORT):
        inputs.append(arrival(rng, seq_id, at_s, num_prompt))
    return sorted(inputs, key=lambda one: one[0])


def arrival(rng: Random, seq_id: int, at_s: float, num_prompt: int) -> tuple[Ns, Arrive]:
    at = Ns(int(at_s * NS_PER_S))
    seq = SeqSpec(
        seq_id=SeqId(seq_id),
        request_id=f"r{seq_id}",
        prompt_tokens=tuple(rng.randrange(VOCAB) for _ in range(num_prompt)),
        params=SamplingParams(max_tokens=32, ignore_eos=True),
        arrived_ns=at,
    )
    return at, Arrive((seq,))


def run(scheduler: SchedulerConfig, *, seed: int = 1, long: Long = THREE) -> Outcome:
    setup = WorkerSetup(
        config=WorkerConfig(scheduler=scheduler),
        spec=SPEC,
        cost=GUESS,
        inputs=arrivals(seed, long),
        steps=FakeSteps(TRUTH, VOCAB),
    )
    last_ns: dict[SeqId, Ns] = {}
    gaps_ms: list[float] = []

    def observe(worker: int, now: Ns, event: EngineEvent, effects: object) -> None:
        assert isinstance(effects, list)
        emits: list[EngineEffect] = effects
        for effect in emits:
            if isinstance(effect, Emit) and effect.tokens:
                if effect.seq_id in last_ns:
                    gaps_ms.append((now - last_ns[effect.seq_id]) / NS_PER_MS)
                last_ns[effect.seq_id] = now

    report = simulate(World(workers=(setup,), is_checked=False), observe)
    ttft_ms: tuple[list[float], list[float]] = ([], [])
    for record in report.workers[0].records:
        assert record.ttft_ns is not None
        ttft_ms[record.seq_id >= NUM_SHORT].append(record.ttft_ns / NS_PER_MS)
    return Outcome(sorted(ttft_ms[0]), sorted(ttft_ms[1]), sorted(gaps_ms), report.trace_hash)


@pytest.fixture(scope="module")
def before() -> Outcome:
    return run(SchedulerConfig(budget="fixed", short_prompt_tokens=10_000_000))


@pytest.fixture(scope="module")
def after() -> Outcome:
    return run(SchedulerConfig())


def test_a_short_request_has_its_first_token_soon(before: Outcome, after: Outcome) -> None:
    assert percentile(before.short_ttft_ms, 0.95) > 30_000
    assert percentile(after.short_ttft_ms, 0.5) < 300
    assert percentile(after.short_ttft_ms, 0.95) < 600


def test_those_that_decode_keep_their_target(before: Outcome, after: Outcome) -> None:
    assert percentile(before.gaps_ms, 0.99) > 1_500
    assert percentile(after.gaps_ms, 0.9) <= 50
    assert percentile(after.gaps_ms, 0.99) < 70


def test_a_long_prompt_still_advances(before: Outcome, after: Outcome) -> None:
    assert after.long_ttft_ms[-1] < 2 * before.long_ttft_ms[-1]


def test_the_lanes_alone_are_what_shortens_the_wait() -> None:
    lanes = run(SchedulerConfig(budget="fixed"))
    assert percentile(lanes.short_ttft_ms, 0.95) < 5_000
    assert percentile(lanes.gaps_ms, 0.99) > 1_500


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nor_does_a_prompt_of_which_a_token_takes_longer_than_a_step(seed: int) -> None:
    """p99 without it, and with it: 222 and 463, 219 and 558, 210 and 479 ms."""
    without = run(SchedulerConfig(), seed=seed, long=())
    beside = run(SchedulerConfig(), seed=seed, long=((2, 100_000),))
    assert percentile(without.short_ttft_ms, 0.99) < 250
    assert percentile(beside.short_ttft_ms, 0.99) < 600
    assert beside.gaps_ms[-1] < 250


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_less_than_doubles_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """L03: p99 of 600 short ones without a prompt of 100,000 tokens, and beside it."""
    monkeypatch.setattr(sys.modules[__name__], "NUM_SHORT", 600)
    without, beside = (run(SchedulerConfig(), long=long) for long in ((), ((2, 100_000),)))
    p99 = [percentile(outcome.short_ttft_ms, 0.99) for outcome in (without, beside)]
    assert p99[1] < 1.8 * p99[0]
    assert len(beside.long_ttft_ms) == 1


@pytest.mark.parametrize("seeds", FEW_AND_A_THOUSAND)
def test_over_seeds_it_less_than_doubles_the_wait(seeds: range) -> None:
    """All short ones together. Of a prompt of 100,000 tokens, what is computed beside them."""
    without, beside, num_long = list[float](), list[float](), list[int]()
    for seed in seeds:
        alone = run(SchedulerConfig(), seed=seed, long=()).short_ttft_ms
        waits, num_computed = beside_a_part(seed)
        assert len(waits) == len(alone) == NUM_SHORT
        assert num_computed > 5_000, seed  # seed 130, with a crowd of short ones: 9,759
        num_long.append(num_computed)
        without += alone
        beside += waits
    assert fmean(num_long) > 10_000
    p99 = [percentile(sorted(waits), 0.99) for waits in (without, beside)]
    assert p99[1] < 2 * p99[0]


def beside_a_part(seed: int) -> tuple[list[float], int]:
    """The waits of short ones in ms, and the tokens of the long one that were computed until it was
    cancelled, behind the last of them.
    """
    inputs = arrivals(seed, ((2, 100_000),))
    end = Ns(inputs[-1][0] + 2 * NS_PER_S)
    setup = WorkerSetup(
        config=WorkerConfig(scheduler=SchedulerConfig()),
        spec=SPEC,
        cost=GUESS,
        inputs=[*inputs, (end, Cancel(SeqId(NUM_SHORT)))],
        steps=FakeSteps(TRUTH, VOCAB),
    )
    (worker,) = simulate(World(workers=(setup,), is_checked=False)).workers
    assert worker.stats is not None
    short = [one for one in worker.records if one.seq_id < NUM_SHORT]
    num_short = sum(one.num_prompt_tokens + one.num_output_tokens for one in short)
    waits = [one.ttft_ns / NS_PER_MS for one in short if one.ttft_ns is not None]
    return waits, worker.stats.num_computed_tokens - num_short


def test_what_is_learned_is_the_same_every_time(after: Outcome) -> None:
    assert run(SchedulerConfig()).trace_hash == after.trace_hash
