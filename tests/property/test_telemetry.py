"""Whatever legally happens to sequences, their time is accounted for to the nanosecond."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.base.events import (
    Admitted,
    Arrive,
    Cancel,
    CopyDone,
    Emit,
    EngineEffect,
    EngineEvent,
    Finish,
    Preempted,
    Reject,
    StartCopy,
    StartStep,
    StepDone,
    StepFailed,
)
from headrace.core.base.plan import SeqStep, StepPlan, StepResult, WorkerSpec
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import Ns, SeqId, StepId
from headrace.core.config.schema import SchedulerConfig, WorkerConfig
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import CostModel, StepShape
from headrace.core.telemetry import Cause, Counters, GoodputWindow, RequestRecord, Telemetry
from headrace.sim.world import WorkerSetup, World, simulate

TIGHT = Slo(ttft_ms=1e-3, itl_ms=1e-3, tpot_ms=1e-3, e2e_ms=1e-3)


class FreeCost:
    """A model that predicts the least it may: no proportions to divide by."""

    def step_ns(self, shape: StepShape) -> Ns:
        return Ns(1)

    def copy_ns(self, num_bytes: int, link: str) -> Ns:
        return Ns(1)


class WildCost(FreeCost):
    """A model that is not even monotone."""

    def step_ns(self, shape: StepShape) -> Ns:
        return Ns(1 + (shape.num_tokens * 7919 + shape.num_kv_tokens * 104_729) % 1000)


COSTS: list[CostModel] = [FittedCostModel.prior(), FreeCost(), WildCost()]


def check_record(record: RequestRecord) -> None:
    parts = record.time.by_cause()
    assert record.time.total_ns == record.e2e_ns == record.finished_ns - record.arrived_ns
    assert min(parts.values()) >= 0
    assert parts[Cause.CLIENT_BACKPRESSURE] == 0
    assert sum(record.itl.histogram) == record.itl.count == max(record.num_output_tokens - 1, 0)
    if record.ttft_time is None or record.ttft_ns is None:
        assert (record.first_token_ns, record.ttft_time, record.ttft_ns) == (None, None, None)
    else:
        assert record.ttft_time.total_ns == record.ttft_ns
        assert min((record.time - record.ttft_time).by_cause().values()) >= 0
    if record.worst_gap_time is not None:
        assert record.worst_gap_time.total_ns == record.itl.max_ns
        assert min(record.worst_gap_time.by_cause().values()) >= 0
    for miss in record.misses:
        assert miss.actual_ns > miss.limit_ns
        assert parts[miss.cause] > 0
    if record.num_preemptions == 0 and record.admitted_ns is None:
        waits = (Cause.ROUTER_WAIT, Cause.QUEUE, Cause.KV_LOAD, Cause.TRANSFER)
        assert record.e2e_ns == sum(parts[cause] for cause in waits)


class Seq:
    """What a legal engine knows of a sequence."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.num_known = num_prompt
        self.num_computed = 0
        self.num_preemptions = 0
        self.is_running = False


class Histories(RuleBasedStateMachine):
    """An engine that decides at random, but breaks no law."""

    @initialize(cost=st.sampled_from(COSTS), slo=st.sampled_from([TIGHT, Slo()]))
    def begin(self, cost: CostModel, slo: Slo) -> None:
        self.telemetry = Telemetry(slo, cost)
        self.counters = Counters()
        self.window = GoodputWindow()
        self.now = 1_000_000
        self.seqs: dict[SeqId, Seq] = {}
        self.plan: StepPlan | None = None
        self.copies: set[int] = set()
        self.num_seqs = self.num_steps = self.num_copies = self.num_records = 0

    def see(self, event: EngineEvent, *effects: EngineEffect) -> None:
        records = self.telemetry.observe(Ns(self.now), event, effects)
        self.counters.observe(event, effects)
        self.window.observe(Ns(self.now), event, effects)
        self.num_records += len(records)
        for record in records:
            check_record(record)

    def tick(self, *effects: EngineEffect) -> None:
        """Effects of an event that concerns nobody."""
        self.see(Cancel(SeqId(-1)), *effects)

    def in_step(self) -> set[SeqId]:
        return set() if self.plan is None else {share.seq_id for share in self.plan.seqs}

    def pick(self, data: st.DataObject, ids: list[SeqId]) -> SeqId:
        return data.draw(st.sampled_from(sorted(ids)))

    @rule(ns=st.integers(1, 100_000))
    def time_passes(self, ns: int) -> None:
        self.now += ns

    @rule(prompts=st.lists(st.integers(1, 40), min_size=1, max_size=3), ago=st.integers(0, 5000))
    def arrive(self, prompts: list[int], ago: int) -> None:
        specs = []
        for num_prompt in prompts:
            seq_id = SeqId(self.num_seqs)
            self.num_seqs += 1
            self.seqs[seq_id] = Seq(num_prompt)
            specs.append(
                SeqSpec(
                    seq_id=seq_id,
                    request_id="r",
                    prompt_tokens=(1,) * num_prompt,
                    params=SamplingParams(),
                    arrived_ns=Ns(self.now - ago),
                )
            )
        self.see(Arrive(tuple(specs)))

    @rule()
    def arrive_in_vain(self) -> None:
        seq_id = SeqId(self.num_seqs)
        self.num_seqs += 1
        spec = SeqSpec(seq_id=seq_id, request_id="r", prompt_tokens=(1,), params=SamplingParams())
        self.see(Arrive((spec,)), Reject(seq_id, 429, "queue_full", ""))

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        seq_id = self.pick(data, self.waiting())
        seq = self.seqs[seq_id]
        seq.is_running = True
        seq.num_computed = data.draw(st.integers(0, seq.num_known - 1))
        self.tick(Admitted(seq_id, seq.num_computed))

    @precondition(lambda self: self.plan is None and self.running())
    @rule(data=st.data())
    def start_step(self, data: st.DataObject) -> None:
        chosen = data.draw(
            st.lists(st.sampled_from(self.running()), min_size=1, max_size=6, unique=True)
        )
        shares = []
        for seq_id in chosen:
            seq = self.seqs[seq_id]
            num_tokens = data.draw(st.integers(1, seq.num_known - seq.num_computed))
            shares.append(SeqStep(seq_id, seq.num_computed, (1,) * num_tokens, ()))
        self.plan = StepPlan(StepId(self.num_steps), tuple(shares))
        self.num_steps += 1
        self.tick(StartStep(self.plan))

    @precondition(lambda self: self.plan is not None)
    @rule(ends=st.booleans())
    def end_step(self, ends: bool) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        effects: list[EngineEffect] = []
        for share in plan.seqs:
            seq = self.seqs[share.seq_id]
            seq.num_computed += len(share.tokens)
            if seq.num_computed == seq.num_known:
                seq.num_known += 1
                effects.append(Emit(share.seq_id, (1,)))
                if ends:
                    effects.append(self.finish(share.seq_id, FinishReason.LENGTH))
        self.see(StepDone(StepResult(plan.step_id, (), Ns(0))), *effects)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def fail_step(self) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        lost = [self.lose(share.seq_id) for share in plan.seqs]
        self.see(StepFailed(plan.step_id, "fault"), *lost)

    @precondition(lambda self: set(self.running()) - self.in_step())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seq_id = self.pick(data, list(set(self.running()) - self.in_step()))
        self.tick(self.lose(seq_id))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), is_handoff=st.booleans())
    def start_copy(self, data: st.DataObject, is_handoff: bool) -> None:
        self.copies.add(self.num_copies)
        seq_id = self.pick(data, list(self.seqs))
        copy = StartCopy(
            copy_id=self.num_copies,
            source="",
            names=(),
            block_ids=(),
            seq_id=seq_id,
            is_handoff=is_handoff,
        )
        self.tick(copy)
        self.num_copies += 1

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        copy_id = data.draw(st.sampled_from(sorted(self.copies)))
        self.copies.remove(copy_id)
        self.see(CopyDone(copy_id, 0))

    @precondition(lambda self: self.seqs.keys() - self.in_step())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        seq_id = self.pick(data, list(self.seqs.keys() - self.in_step()))
        self.see(Cancel(seq_id), self.finish(seq_id, FinishReason.CANCELLED))

    @invariant()
    def everything_adds_up(self) -> None:
        self.counters.check()
        assert self.counters.num_waiting == len(self.waiting())
        assert self.counters.num_running == len(self.running())
        assert self.telemetry.num_live == len(self.seqs)

    def teardown(self) -> None:
        if self.plan is not None:
            self.end_step(ends=True)
        for seq_id in list(self.seqs):
            self.tick(self.finish(seq_id, FinishReason.ERROR))
        assert self.telemetry.num_live == 0
        assert self.counters.num_finished.total() == self.num_records
        assert self.num_records == self.counters.num_accepted

    def waiting(self) -> list[SeqId]:
        return [seq_id for seq_id, seq in self.seqs.items() if not seq.is_running]

    def running(self) -> list[SeqId]:
        return [seq_id for seq_id, seq in self.seqs.items() if seq.is_running]

    def lose(self, seq_id: SeqId) -> Preempted:
        seq = self.seqs[seq_id]
        lost, seq.num_computed, seq.is_running = seq.num_computed, 0, False
        seq.num_preemptions += 1
        return Preempted(seq_id, "", lost)

    def finish(self, seq_id: SeqId, reason: FinishReason) -> Finish:
        seq = self.seqs.pop(seq_id)
        num_output = seq.num_known - seq.num_prompt
        return Finish(seq_id, reason, seq.num_prompt, num_output, 0, seq.num_preemptions)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=20, stateful_step_count=40)


# ---- the real engine


def random_world(seed: int, *, failure_rate: float) -> World:
    """More sequences than the KV pool holds, cancelled and late ones among them."""
    rng = Random(seed)
    inputs: list[tuple[Ns, Arrive | Cancel]] = []
    for i in range(60):
        at_ns = rng.randrange(2_000_000_000)
        spec = SeqSpec(
            seq_id=SeqId(i),
            request_id=f"r{i}",
            prompt_tokens=tuple(rng.randrange(3) for _ in range(rng.randrange(1, 90))),
            params=SamplingParams(max_tokens=rng.randrange(1, 60), ignore_eos=True),
            slo=rng.choice([Slo(), Slo(ttft_ms=100.0), TIGHT]),
            deadline_ns=Ns(at_ns + rng.randrange(1, 3_000_000_000)) if rng.random() < 0.1 else None,
            arrived_ns=Ns(max(0, at_ns - rng.randrange(1_000_000))),
        )
        inputs.append((Ns(at_ns), Arrive((spec,))))
        if rng.random() < 0.15:
            inputs.append((Ns(at_ns + rng.randrange(2_000_000_000)), Cancel(SeqId(i))))
    worker = WorkerSpec(
        model_digest="sim",
        kv_dtype="bf16",
        block_size=16,
        num_blocks=24,
        max_model_len=160,
        vocab_size=100,
    )
    scheduler = SchedulerConfig(step_tokens=32, admission="optimistic", max_running_seqs=12)
    return World(
        workers=(
            WorkerSetup(
                config=WorkerConfig(scheduler=scheduler),
                spec=worker,
                cost=FittedCostModel.prior(),
                inputs=inputs,
            ),
        ),
        seed=seed,
        failure_rate=failure_rate,
    )


@pytest.mark.parametrize(("seed", "failure_rate"), [(1, 0.0), (2, 0.0), (3, 0.05), (4, 0.3)])
def test_the_real_engine_is_accounted_for(seed: int, failure_rate: float) -> None:
    cost = FittedCostModel.prior()
    telemetry, counters = Telemetry(Slo(), cost), Counters()
    records: dict[SeqId, RequestRecord] = {}

    def observe(worker: int, now: Ns, event: EngineEvent, effects: Sequence[EngineEffect]) -> None:
        counters.observe(event, effects)
        counters.check()
        for record in telemetry.observe(now, event, effects):
            check_record(record)
            assert record.seq_id not in records
            records[record.seq_id] = record

    world = random_world(seed, failure_rate=failure_rate)
    report = simulate(world, observe).workers[0]
    stats = report.stats
    assert stats is not None
    assert telemetry.num_live == counters.num_waiting == counters.num_running == 0
    finishes = {i: end for i, end in report.ends_by_seq_id.items() if isinstance(end, Finish)}
    assert records.keys() == finishes.keys()
    for seq_id, record in records.items():
        finish = finishes[seq_id]
        assert record.reason is finish.reason
        assert record.num_preemptions == finish.num_preemptions
        assert record.num_output_tokens == len(report.tokens_by_seq_id.get(seq_id, ()))
        if record.num_preemptions:
            assert record.time.preemption_ns > 0
        elif failure_rate == 0.0:
            assert record.time.preemption_ns == 0
    assert counters.num_preemptions == stats.num_preemptions > 0
    assert counters.num_lost_tokens == stats.num_recomputed_tokens
    assert sum(record.time.others_prefill_ns for record in records.values()) > 0
