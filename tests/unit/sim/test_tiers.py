"""Lower tiers of KV: what lies where, how long it takes to bring, and what overflows."""

from random import Random
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError
from headrace.core.base.request import Slo
from headrace.core.base.types import Ns
from headrace.core.cost.fitted import Link
from headrace.core.workload.recording import Recording, read_recording
from headrace.sim.compare import Run, figures
from headrace.sim.tiers import Tier, Tiers
from headrace.sim.whatif import Changes, Trial, run_trial, span_s
from support.recordings import line, lines_of, pool

BLOCK_BYTES = 1000
A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")
NOW = Ns(1_000_000)


def tiers(*num_blocks: int, byte_ns: float = 1.0, latency_ns: float = 100.0) -> Tiers:
    link = Link(latency_ns=latency_ns, byte_ns=byte_ns)
    specs = [Tier(name="t", num_bytes=n * BLOCK_BYTES, link=link) for n in num_blocks]
    return Tiers(specs, BLOCK_BYTES)


def test_what_overflows_goes_down_and_then_is_gone() -> None:
    found = tiers(1, 2)
    gone = [found.put(NOW, name) for name in (A, B, C, D)]
    assert gone == [[], [], [], [A]]
    assert found.names() == [D, B, C]
    assert A not in found
    assert len(found) == 3


def test_what_was_used_last_stays() -> None:
    found = tiers(2)
    for name in (A, B):
        found.put(NOW, name)
    found.load(NOW, [A])
    assert found.put(NOW, C) == [B]
    assert found.put(NOW, A) == []  # it is there already
    assert found.put(NOW, D) == [C]


def test_a_link_carries_one_thing_after_another() -> None:
    found = tiers(8)
    assert found.load_ns(NOW, []) == 0
    for name in (A, B):
        found.put(NOW, name)  # 1000 ns each
    assert found.load_ns(NOW, [A, B]) == 2000 + 100 + 2000
    assert found.load(NOW, [A, B]) == 4100
    assert found.load_ns(NOW, [A]) == 4100 + 100 + 1000
    later = Ns(NOW + 10_000)
    assert found.load_ns(later, [A]) == 1100


def test_tiers_are_read_at_the_same_time() -> None:
    found = Tiers(
        [
            Tier(name="host", num_bytes=BLOCK_BYTES, link=Link(latency_ns=0.0, byte_ns=1.0)),
            Tier(name="disk", num_bytes=BLOCK_BYTES, link=Link(latency_ns=0.0, byte_ns=5.0)),
        ],
        BLOCK_BYTES,
    )
    for name in (A, B):
        found.put(NOW, name)
    later = Ns(NOW + 100_000)
    assert found.load_ns(later, [B, A]) == 5000


# ---- beneath workers


def talk(num_stems: int = 12, num_rounds: int = 6) -> Recording:
    """Long beginnings that come again and again, in turns: more than 100 blocks hold."""
    rng = Random(7)
    stems = [[rng.randrange(900) for _ in range(320)] for _ in range(num_stems)]
    return read_recording(
        lines_of(
            [
                line(
                    number,
                    number * 0.06,
                    stems[number % num_stems] + [rng.randrange(900) for _ in range(9)],
                    [1, 2],
                )
                for number in range(num_stems * num_rounds)
            ],
            pool(num_blocks=100),
        )
    )


def tried(recording: Recording, **changes: Any) -> dict[str, float]:
    outcomes = run_trial(recording, Trial(changes=Changes(**changes)))
    found = figures(Run(outcomes=(outcomes,), span_s=span_s(recording)))
    return {name: value for name, value in found.items() if value is not None}


def test_a_tier_brings_back_what_the_device_had_to_forget() -> None:
    recording = talk()
    without, host = tried(recording), tried(recording, kv_host_bytes=1 << 30)
    assert without["hit_rate"] < 0.1
    # All but the first round: 320 of 329 tokens.
    assert host["hit_rate"] == pytest.approx(5 / 6 * 320 / 329, rel=0.02)
    assert host["ttft_ms_mean"] < without["ttft_ms_mean"] / 2


def test_waiting_for_a_tier_is_a_cause_of_its_own() -> None:
    """20 blocks take 16 ms at 20 MB/s, and 32 ms to compute."""
    changes = Changes(kv_host_bytes=1 << 30, kv_host_gb_s=0.02)
    found = run_trial(talk(), Trial(changes=changes, slo=Slo(ttft_ms=10.0)))
    assert found.misses["ttft", "kv_load"] >= 50


def test_a_tier_that_is_too_small_or_too_slow_is_no_use() -> None:
    recording = talk()
    small = tried(recording, kv_host_bytes=40 << 14)  # 40 blocks of 16 KiB
    assert small["hit_rate"] < 0.2
    # 20 blocks take 33 s at 10 KB/s, and 32 ms to compute.
    slow = tried(recording, kv_disk_bytes=1 << 30, kv_disk_gb_s=1e-5)
    assert slow["hit_rate"] < 0.1
    assert slow["ttft_ms_mean"] == pytest.approx(tried(recording)["ttft_ms_mean"], rel=0.05)


def test_a_disk_takes_what_the_host_cannot() -> None:
    recording = talk()
    both = tried(recording, kv_host_bytes=40 << 14, kv_disk_bytes=1 << 30)
    assert both["hit_rate"] > 0.7


def test_several_workers_and_the_router_know_of_it() -> None:
    recording = talk()
    found = tried(recording, workers=2, policy="kv", kv_host_bytes=1 << 30)
    assert found["hit_rate"] > 0.7


def test_a_block_must_weigh_something() -> None:
    lines = lines_of([line(0, 0.0, [1] * 20)])
    recording = read_recording(
        [part.replace(b'"kv_block_bytes":16384', b'"kv_block_bytes":0') for part in lines]
    )
    with pytest.raises(ConfigError, match="--kv-disk"):
        tried(recording, kv_disk_bytes=1 << 30)
