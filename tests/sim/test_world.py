"""The simulator: one seed, one trace; and no world, however unlucky, loses a sequence."""

from functools import cache
from random import Random

import pytest

from headrace.adapters.executors.sim import RecordedSteps, StepOutcome, lost_step
from headrace.core.base.errors import InvariantError
from headrace.core.base.events import Arrive, Cancel, Finish, Reject, StepDone, StepFailed
from headrace.core.base.plan import StepPlan, WorkerSpec
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_MS, Ns, SeqId
from headrace.core.config.schema import KvConfig, SchedulerConfig, WorkerConfig
from headrace.core.cost.model import StepShape
from headrace.sim.world import WorkerReport, WorkerSetup, World, simulate
from support.fake_device import VOCAB, FakeDevice, LinearCost, expected_output


class DeviceSteps:
    """Steps computed on a device that checks what it reads; a share of them fails."""

    def __init__(
        self,
        spec: WorkerSpec,
        inputs: list[tuple[Ns, Arrive | Cancel]],
        seed: int,
        failure_rate: float,
    ):
        self._device = FakeDevice(spec)
        self._rng = Random(seed)
        self._failure_rate = failure_rate
        for _, event in inputs:
            if isinstance(event, Arrive):
                for seq in event.seqs:
                    self._device.add(seq)

    def outcome(self, plan: StepPlan) -> StepOutcome:
        elapsed_ns = LinearCost().step_ns(StepShape.of(plan))
        if self._rng.random() < self._failure_rate:
            return StepFailed(plan.step_id, "fault"), elapsed_ns
        return StepDone(self._device.run(plan)), elapsed_ns

    def lost(self, plan: StepPlan) -> StepOutcome:
        return lost_step(plan)


def draw_prompt(rng: Random, stems: list[tuple[int, ...]]) -> tuple[int, ...]:
    stem = rng.choice(stems)
    own = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))
    return stem[: rng.randrange(len(stem) + 1)] + own


def draw_seq(rng: Random, seq_id: int, stems: list[tuple[int, ...]]) -> SeqSpec:
    return SeqSpec(
        seq_id=SeqId(seq_id),
        request_id=f"r{seq_id}",
        prompt_tokens=draw_prompt(rng, stems),
        params=SamplingParams(
            max_tokens=rng.randrange(1, 60),
            min_tokens=rng.choice((0, 0, 1)),
            seed=rng.randrange(3),
            stop_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.3 else (),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        ),
        eos_token_ids=(VOCAB - 1,),
        priority=rng.randrange(3),
        slo=Slo(ttft_ms=rng.choice((None, 0.001, 0.1)), itl_ms=rng.choice((None, 0.001))),
        deadline_ns=Ns(rng.randrange(1, 200_000)) if rng.random() < 0.2 else None,
    )


def draw_worker(seed: int) -> WorkerSetup:
    """A small worker under stress: few blocks, any policy, shared prefixes, cancels, deadlines and
    faults.
    """
    rng = Random(seed)
    stems = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(70))) for _ in range(3)]
    spec = WorkerSpec(
        model_digest="00" * 32,
        kv_dtype="bf16",
        block_size=16,
        num_blocks=rng.randrange(4, 24),
        max_model_len=160,
        vocab_size=VOCAB,
        can_copy_blocks=rng.random() < 0.7,
    )
    scheduler = SchedulerConfig(
        overlap=rng.choice(("off", "on", "auto")),
        step_tokens=rng.choice((1, 7, 16, 64, 512)),
        chunk_tokens=rng.choice((0, 0, 5, 16)),
        max_running_seqs=rng.choice((1, 3, 16, 256)),
        max_waiting_seqs=rng.choice((3, 4096)),
        order=rng.choice(("fcfs", "priority", "longest_prefix", "slo_slack")),
        budget=rng.choice(("fixed", "itl")),
        itl_target_ms=0.01,
        short_prompt_tokens=rng.choice((0, 20, 512)),
        short_prompt_share=rng.choice((0.1, 0.75)),
        max_long_prefills=rng.choice((1, 4)),
        admission=rng.choice(("predicted", "optimistic", "no_evict")),
        predicted_output_tokens=rng.choice((0, 16, 128)),
        early_reject=rng.random() < 0.3,
        skip_ahead_window=rng.choice((0, 2, 64)),
        skip_ahead_age_ms=rng.choice((0.0, 0.01, 2000.0)),
        max_preemptions=rng.choice((0, 2)),
    )
    config = WorkerConfig(scheduler=scheduler, kv=KvConfig(prefix_cache=rng.random() < 0.8))
    inputs: list[tuple[Ns, Arrive | Cancel]] = []
    next_id = at = 0
    for _ in range(rng.randrange(1, 14)):
        at += rng.randrange(20_000)
        seqs = tuple(draw_seq(rng, next_id + i, stems) for i in range(rng.choice((1, 1, 1, 3))))
        next_id += len(seqs)
        inputs.append((Ns(at), Arrive(seqs)))
        if rng.random() < 0.3:
            inputs.append(
                (Ns(at + rng.randrange(50_000)), Cancel(SeqId(rng.randrange(next_id + 1))))
            )
    steps = DeviceSteps(spec, inputs, seed, rng.choice((0.0, 0.0, 0.05, 0.3)))
    return WorkerSetup(config=config, spec=spec, cost=LinearCost(), inputs=inputs, steps=steps)


@cache
def run(seed: int) -> WorkerReport:
    (report,) = simulate(World(workers=(draw_worker(seed),), max_calls=100_000)).workers
    return report


def specs_of(setup: WorkerSetup) -> dict[SeqId, SeqSpec]:
    return {
        seq.seq_id: seq
        for _, event in setup.inputs
        if isinstance(event, Arrive)
        for seq in event.seqs
    }


def test_every_accepted_sequence_has_its_record() -> None:
    for seed in range(20):
        report = run(seed)
        finished = {
            seq_id: end for seq_id, end in report.ends_by_seq_id.items() if isinstance(end, Finish)
        }
        assert {record.seq_id for record in report.records} == finished.keys()
        for record in report.records:
            assert record.reason is finished[record.seq_id].reason
            assert record.num_output_tokens == finished[record.seq_id].num_output_tokens


@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_no_world_loses_a_sequence_a_block_or_a_token(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        report, specs = run(seed), specs_of(draw_worker(seed))
        assert report.ends_by_seq_id.keys() == specs.keys(), f"seed {seed}"
        for seq_id, end in report.ends_by_seq_id.items():
            tokens = tuple(report.tokens_by_seq_id.get(seq_id, ()))
            expected = expected_output(specs[seq_id])
            if isinstance(end, Finish) and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert tokens == expected, f"seed {seed}"
            else:
                assert tokens == expected[: len(tokens)], f"seed {seed}"


def test_the_sweep_meets_every_kind_of_end() -> None:
    """Or it would prove nothing about them."""
    ends: set[str] = set()
    num_preemptions = num_hit_tokens = 0
    for seed in range(200):
        report = run(seed)
        assert report.stats is not None
        num_preemptions += report.stats.num_preemptions
        num_hit_tokens += report.stats.num_hit_tokens
        for end in report.ends_by_seq_id.values():
            ends.add(end.code if isinstance(end, Reject) else end.reason.value)
    assert ends >= {"stop", "length", "cancelled", "deadline", "error"}
    assert ends >= {"queue_full", "ttft_unattainable", "kv_pool_too_small"}
    assert num_preemptions > 50
    assert num_hit_tokens > 1000


def fake_world(seed: int, failure_rate: float = 0.1) -> World:
    worker = draw_worker(3)
    setup = WorkerSetup(
        config=worker.config, spec=worker.spec, cost=LinearCost(), inputs=worker.inputs
    )
    return World(workers=(setup, setup), seed=seed, failure_rate=failure_rate)


def test_the_seed_decides_the_trace() -> None:
    first = simulate(fake_world(1))
    assert simulate(fake_world(1)) == first
    assert simulate(fake_world(2)).trace_hash != first.trace_hash
    assert simulate(fake_world(1, failure_rate=0.0)).trace_hash != first.trace_hash


def test_the_observer_sees_every_event_in_order() -> None:
    seen: list[tuple[int, Ns]] = []
    report = simulate(fake_world(1), lambda worker, now, event, effects: seen.append((worker, now)))
    assert len(seen) == report.num_events
    assert [now for _, now in seen] == sorted(now for _, now in seen)
    assert {worker for worker, _ in seen} == {0, 1}
    assert seen[-1][1] == report.end_ns


def test_a_world_that_does_not_end_is_reported() -> None:
    with pytest.raises(InvariantError, match="does not end"):
        simulate(World(workers=fake_world(1).workers, max_calls=3))


def test_a_step_that_was_never_recorded_fails_its_sequences() -> None:
    worker = draw_worker(3)
    seq = SeqSpec(
        seq_id=SeqId(0), request_id="r", prompt_tokens=(1, 2), params=SamplingParams(max_tokens=2)
    )
    setup = WorkerSetup(
        config=WorkerConfig(),
        spec=worker.spec,
        cost=LinearCost(),
        inputs=[(Ns(NS_PER_MS), Arrive((seq,)))],
        steps=RecordedSteps({}),
    )
    (report,) = simulate(World(workers=(setup,))).workers
    end = report.ends_by_seq_id[SeqId(0)]
    assert isinstance(end, Finish)
    assert end.reason is FinishReason.ERROR
    assert "not recorded" in end.error
