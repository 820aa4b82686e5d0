"""The page's routing toy to the last assignment, and the same question of other streams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.workload.traces import TraceRequest
from headrace.plan.routing import (
    Policy,
    PolicyRun,
    RoutingSetup,
    cumulative_cached_tokens,
    reference_stream,
    run_policy,
)

STREAM = "S S U S S S U S S U S S S U S S U S S U".split()


def run(policy: Policy, kv_weight: float = 3.0) -> PolicyRun:
    return run_policy(policy, reference_stream(), RoutingSetup(kv_weight=kv_weight))


def ways(found: PolicyRun) -> list[str]:
    """What each worker got, as the page writes it."""
    cells: list[list[str]] = [[] for _ in found.num_requests_by_worker]
    for number, (kind, one) in enumerate(zip(STREAM, found.assignments, strict=True), 1):
        cells[one.worker].append(f"{kind}{number}{'*' if one.cached_tokens else ''}")
    return [" ".join(cell) for cell in cells]


def test_the_order_of_the_stream() -> None:
    assert ["S" if request.blocks else "U" for request in reference_stream()] == STREAM


@pytest.mark.parametrize("kv_weight", [2.87, 3.0, 4.0, 4.28])
def test_kv_aware_to_the_last_assignment(kv_weight: float) -> None:
    found = run(Policy.KV_AWARE, kv_weight)
    assert ways(found) == [
        "S1 S2* S4* S9* S16*",
        "U3 U10 U14 U17 U20",
        "S5 S6* S8* S11* S18*",
        "U7 S12 S13* S15* S19*",
    ]
    assert (found.num_hits, found.num_shareable, found.cached_tokens) == (11, 14, 6160)
    assert found.saved_prefill_ms == pytest.approx(123.2)
    assert found.num_requests_by_worker == (5, 5, 5, 5)


@pytest.mark.parametrize("policy", [Policy.ROUND_ROBIN, Policy.LOAD_AWARE])
def test_the_others_deal_out_in_turn(policy: Policy) -> None:
    found = run(policy)
    assert [one.worker for one in found.assignments] == [i % 4 for i in range(20)]
    assert (found.num_hits, found.cached_tokens, found.max_load) == (10, 5600, 5)
    assert found.saved_prefill_ms == pytest.approx(112.0)


def trace(*prefixes: tuple[int, ...], gap_s: float = 0.0) -> list[TraceRequest]:
    return [
        TraceRequest(
            arrival_s=i * gap_s, prompt_tokens=100, output_tokens=1, blocks=blocks, block_tokens=16
        )
        for i, blocks in enumerate(prefixes)
    ]


def test_only_the_longest_prefix_counts() -> None:
    requests = trace((1, 2, 3), (1, 9, 3), (1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 6, 7))
    found = run_policy(Policy.ROUND_ROBIN, requests, RoutingSetup(num_workers=1))
    assert [one.cached_tokens for one in found.assignments] == [0, 16, 48, 100]


def test_load_leaves_after_its_time() -> None:
    requests = trace(*[(1,)] * 10, gap_s=1.0)
    setup = RoutingSetup(num_workers=2, hold_s=0.5)
    alone = run_policy(Policy.LOAD_AWARE, requests, setup)
    assert (alone.max_load, alone.num_requests_by_worker) == (1, (10, 0))


@given(st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), max_size=40), st.integers(1, 5))
def test_no_policy_finds_more_than_one_worker_would(
    prefixes: list[tuple[int, ...]], num_workers: int
) -> None:
    requests = trace(*prefixes)
    most = run_policy(Policy.ROUND_ROBIN, requests, RoutingSetup(num_workers=1)).cached_tokens
    for policy in Policy:
        found = run_policy(policy, requests, RoutingSetup(num_workers=num_workers))
        assert found.cached_tokens <= most
        assert sum(found.num_requests_by_worker) == len(requests)


def test_the_curve_ends_at_the_sum() -> None:
    found = run(Policy.KV_AWARE)
    points = list(cumulative_cached_tokens(found, 7))
    assert points[0] == (0.0, 0.0)
    assert points[-1] == (20.0, 6160.0)
    assert [tokens for _, tokens in points] == sorted(tokens for _, tokens in points)
