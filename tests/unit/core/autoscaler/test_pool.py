from headrace.core.autoscaler.events import PoolWindow, ReplicaLoad
from headrace.core.autoscaler.pool import Pool
from headrace.core.base.types import NS_PER_S, Ns, WorkerId
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
