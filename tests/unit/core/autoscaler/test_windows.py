"""What a pool did, counted once and for whom it was."""

import pytest

from headrace.core.autoscaler.events import PoolWindow, Quantiles, ReplicaLoad
from headrace.core.autoscaler.windows import PoolWindows
from headrace.core.base.events import Admitted, Arrive, Emit, EngineEffect, Finish, Reject
from headrace.core.base.request import FinishReason, SeqSpec, Slo
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_MS, NS_PER_S, Ns, SeqId, WorkerId
from headrace.core.base.worker import Role

SLO = Slo(ttft_ms=100, itl_ms=50)
NUM_PROMPT = 40


class Watch:
    """A clock, and what a front end sees at its times."""

    def __init__(self, *roles: Role) -> None:
        self.now_ms = 0
        self.windows = PoolWindows(self.now, roles, SLO)

    @property
    def now(self) -> Ns:
        return Ns(self.now_ms * NS_PER_MS)

    def arrive(self, *seq_ids: int) -> None:
        specs = tuple(self.spec(seq_id) for seq_id in seq_ids)
        self.windows.observe(self.now, Arrive(specs), [])

    def spec(self, seq_id: int) -> SeqSpec:
        return SeqSpec(
            seq_id=SeqId(seq_id),
            request_id=f"r{seq_id}",
            prompt_tokens=(1,) * NUM_PROMPT,
            params=SamplingParams(),
            arrived_ns=self.now,
        )

    def send(self, seq_id: int, worker_id: int, role: Role = Role.MIXED) -> None:
        self.windows.sent(WorkerId(worker_id), role, [self.spec(seq_id)])

    def say(self, *effects: EngineEffect, after_ms: int = 0) -> None:
        self.now_ms += after_ms
        self.windows.observe(self.now, Arrive(()), effects)

    def admit(self, seq_id: int, num_cached: int = 0) -> None:
        self.say(Admitted(SeqId(seq_id), num_cached))

    def emit(self, seq_id: int, *, after_ms: int) -> None:
        self.say(Emit(SeqId(seq_id), (7,)), after_ms=after_ms)

    def finish(self, seq_id: int, num_output: int) -> None:
        self.say(
            Finish(
                seq_id=SeqId(seq_id),
                reason=FinishReason.LENGTH,
                num_prompt_tokens=NUM_PROMPT,
                num_output_tokens=num_output,
                num_cached_tokens=0,
                num_preemptions=0,
            )
        )

    def close(self, role: Role = Role.MIXED, *worker_ids: int) -> PoolWindow:
        loads = {
            WorkerId(worker_id): ReplicaLoad(replica_id=WorkerId(100 + worker_id))
            for worker_id in worker_ids
        }
        return self.windows.close(
            self.now, role, loads, num_waiting=3, num_starting=2, num_draining=1
        )


def test_a_window_has_what_happened_since_the_last_one() -> None:
    watch = Watch(Role.MIXED)
    watch.arrive(1, 2)
    watch.now_ms += 2000
    window = watch.close()
    assert (window.span_ns, window.num_arrivals) == (2 * NS_PER_S, 2)
    assert window.prompt_tokens == NUM_PROMPT
    assert (window.num_waiting, window.num_starting, window.num_draining) == (3, 2, 1)
    watch.now_ms += 500
    after = watch.close()
    assert (after.span_ns, after.num_arrivals, after.prompt_tokens) == (NS_PER_S // 2, 0, 0.0)


def test_latencies_are_those_of_the_worker_and_keep_the_limits_or_not() -> None:
    watch = Watch(Role.MIXED)
    watch.arrive(1)
    watch.arrive(2)
    watch.send(1, 5)
    watch.send(2, 6)
    for seq_id, ttft_ms, gap_ms in ((1, 20, 10), (2, 100, 60)):
        watch.admit(seq_id)
        watch.emit(seq_id, after_ms=ttft_ms)
        for _ in range(3):
            watch.emit(seq_id, after_ms=gap_ms)
        watch.finish(seq_id, num_output=4)
    good, late, idle = watch.close(Role.MIXED, 5, 6, 7).replicas
    assert good.replica_id == WorkerId(105)
    assert (good.num_samples, good.num_good) == (1, 1)
    assert (good.ttft_ms, good.itl_ms) == (Quantiles(20, 20, 20), Quantiles(10, 10, 10))
    assert (late.num_samples, late.num_good) == (1, 0)
    assert late.itl_ms == Quantiles(60, 60, 60)
    assert (idle.num_samples, idle.ttft_ms) == (0, None)


def test_a_hit_rate_stays_until_another_one_is_known() -> None:
    watch = Watch(Role.MIXED)
    watch.arrive(1, 2)
    for seq_id, num_cached in ((1, NUM_PROMPT // 2), (2, 0)):
        watch.send(seq_id, 0)
        watch.admit(seq_id, num_cached)
    assert watch.close().hit_rate == 0.25
    assert watch.close().hit_rate == 0.25


def test_who_is_handed_on_counts_once_in_each_pool() -> None:
    watch = Watch(Role.PREFILL, Role.DECODE)
    watch.send(1, 0, Role.PREFILL)  # at once, so it is sent before anybody hears of its arrival
    watch.arrive(1)
    assert watch.close(Role.DECODE).num_arrivals == 0
    watch.admit(1)
    watch.emit(1, after_ms=30)
    watch.send(1, 1, Role.DECODE)
    watch.send(1, 2, Role.DECODE)  # its worker was lost
    watch.emit(1, after_ms=10)
    watch.finish(1, num_output=2)
    prefill, decode = watch.close(Role.PREFILL, 0), watch.close(Role.DECODE, 1, 2)
    assert (prefill.num_arrivals, decode.num_arrivals) == (1, 1)
    assert prefill.replicas[0].ttft_ms == Quantiles(30, 30, 30)
    assert [load.num_samples for load in decode.replicas] == [0, 1]
    assert decode.output_tokens == 2.0


@pytest.mark.parametrize("roles", [(Role.MIXED,), (Role.PREFILL, Role.DECODE)])
def test_who_waits_counts_for_the_pool_that_answers(roles: tuple[Role, ...]) -> None:
    watch = Watch(*roles)
    watch.arrive(1)
    watch.say(Reject(SeqId(1), 503, "no_worker", "nobody came"))
    assert watch.close(roles[-1]).num_arrivals == 1
    watch.arrive(1)  # nothing is left of the first
    assert watch.close(roles[-1]).num_arrivals == 1
