import msgspec
import pytest

from headrace.core.autoscaler.events import PoolWindow, ReplicaLoad
from headrace.core.autoscaler.pool import Pool
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
from headrace.core.base.worker import Role
from support.autoscaler_rig import MIXED, REPLICA, SLO, config


def pool() -> Pool:
    found = Pool(MIXED, REPLICA, config(), SLO)
    found.up(Ns(0), WorkerId(1))
    return found


def window(num_arrivals: int, num_ended: int, output: float) -> PoolWindow:
    load = ReplicaLoad(replica_id=WorkerId(1), num_running=1, num_samples=num_ended)
    return PoolWindow(
        role=MIXED,
        span_ns=Ns(5 * NS_PER_S),
        num_arrivals=num_arrivals,
        prompt_tokens=400.0 if num_arrivals else 0.0,
        output_tokens=output,
        replicas=(load,),
    )


def outputs(found: Pool, *windows: PoolWindow) -> float:
    for index, one in enumerate(windows):
        found.observe(Ns((5 + 5 * index) * NS_PER_S), one)
    found.close_interval(60 * NS_PER_S)
    traffic = found._traffic
    assert traffic is not None
    assert traffic.prompt_tokens == 400.0
    return traffic.output_tokens


def test_lengths_of_what_ends_after_the_last_arrival_count() -> None:
    came, ended = window(20, 0, 0.0), window(0, 20, 900.0)
    assert outputs(pool(), came, ended) == 900.0
    assert outputs(pool(), came, window(0, 10, 100.0), window(0, 30, 500.0)) == 400.0


def test_what_ends_before_anything_came_says_nothing_of_prompts() -> None:
    found = pool()
    found.observe(Ns(5 * NS_PER_S), window(0, 3, 50.0))
    assert found.capacity is None


@pytest.mark.parametrize(
    ("role", "low", "high"), [(Role.MIXED, 600, 760), (Role.PREFILL, 60, 280)], ids=str
)
def test_a_pool_that_can_switch_soon_knows_a_mix_that_has_changed(
    role: Role, low: float, high: float
) -> None:
    """Ten minutes of long prompts, then two of short ones."""
    found = Pool(role, REPLICA, config(), SLO)
    found.up(Ns(0), WorkerId(1))
    for index in range(144):
        one = window(5, 5, 20.0)
        prompt_tokens = 800.0 if index < 120 else 60.0
        one = msgspec.structs.replace(one, role=role, prompt_tokens=prompt_tokens)
        found.observe(Ns((5 + 5 * index) * NS_PER_S), one)
    assert found._traffic is not None
    assert low < found._traffic.prompt_tokens < high


def test_but_few_requests_are_no_mix() -> None:
    found = Pool(Role.PREFILL, REPLICA, config(), SLO)
    found.up(Ns(0), WorkerId(1))
    for index in range(120):
        num_arrivals = int(index % 6 == 0)  # one in half a minute
        one = window(num_arrivals, num_arrivals, 20.0)
        prompt_tokens = 0.0 if not num_arrivals else 60.0 if index == 114 else 800.0
        one = msgspec.structs.replace(one, role=Role.PREFILL, prompt_tokens=prompt_tokens)
        found.observe(Ns((5 + 5 * index) * NS_PER_S), one)
    assert found._traffic is not None
    assert found._traffic.prompt_tokens > 750
