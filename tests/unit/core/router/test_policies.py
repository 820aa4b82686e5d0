"""Which worker each policy picks."""

from collections import Counter

import pytest

from headrace.core.base.types import WorkerId
from headrace.core.cost.fitted import FittedCostModel
from support.routing import SIZE, Routing, names, spec, stored

CHAIN = names("shared", 64)


def test_round_robin_takes_turns_whoever_comes_and_goes() -> None:
    routing = Routing(3, policy="round_robin")
    assert [routing.place().worker_id for _ in range(4)] == [0, 1, 2, 0]
    routing.down(1)
    assert [routing.place().worker_id for _ in range(3)] == [2, 0, 2]


@pytest.mark.parametrize("policy", ["random", "power_of_two", "kv", "least_loaded"])
def test_chance_is_a_matter_of_the_seed(policy: str) -> None:
    def choices(seed: int) -> list[int]:
        routing = Routing(8, policy=policy, seed=seed)
        return [routing.place(names(str(i), 4)).worker_id for i in range(8)]

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)


def test_random_reaches_everyone() -> None:
    routing = Routing(4, policy="random")
    counts = Counter(routing.place().worker_id for _ in range(200))
    assert min(counts[i] for i in range(4)) > 20  # type: ignore[index]


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "kv", "prefix", "session"])
def test_work_goes_where_less_is_due(policy: str) -> None:
    routing = Routing(2, policy=policy)
    busy = routing.place(num_tokens=2048).worker_id
    assert routing.place(num_tokens=32).worker_id != busy


def test_of_two_that_are_drawn_the_one_with_less_to_do_is_taken() -> None:
    """So the busiest of three never is."""
    routing = Routing(3, policy="power_of_two")
    routing.stats(1, num_running=4, num_queued_prefill_tokens=8000)
    for number in range(1, 61):
        assert routing.place().worker_id != 1
        routing.serve(number)


def test_a_session_stays_where_it_is_and_moves_only_for_want_of_a_worker() -> None:
    routing = Routing(4, policy="session")
    homes = {key: routing.place(session=key).worker_id for key in map(str, range(20))}
    assert len(set(homes.values())) == 4
    assert all(routing.place(session=key).worker_id == home for key, home in homes.items())
    gone = homes["0"]
    routing.down(gone)
    for key, home in homes.items():
        assert (routing.place(session=key).worker_id == home) == (home != gone)
    routing.up(9, name=f"w{gone}")
    assert routing.place(session="0").worker_id == 9


def test_prefix_follows_what_it_sent_until_loads_are_too_uneven() -> None:
    routing = Routing(4, policy="prefix")
    home = routing.place(CHAIN).worker_id
    routing.serve(1)
    for _ in range(32):
        assert routing.place(CHAIN).worker_id == home
    routing.place(CHAIN)
    assert routing.place(CHAIN).worker_id != home


def test_prefix_takes_no_notice_of_a_short_one() -> None:
    routing = Routing(4, policy="prefix")
    home = routing.place(CHAIN[:8]).worker_id
    routing.started(1)
    others = {routing.place(CHAIN[:8] + names(str(i), 56)).worker_id for i in range(3)}
    assert home not in others


def test_kv_goes_to_the_cached_prefix() -> None:
    routing = Routing(4)
    routing.kv(2, *stored(*CHAIN))
    dispatch = routing.place(CHAIN + names("own", 8))
    chosen = dispatch.decision.chosen
    assert (dispatch.worker_id, chosen.num_hit_blocks) == (2, 64)
    cost = FittedCostModel.prior()
    assert chosen.prefill_ms < routing.place(names("other", 72)).decision.chosen.prefill_ms / 4
    assert cost.num_samples == 0  # nothing was measured: the prior stood in


def test_kv_weighs_a_queue_against_a_prefix() -> None:
    routing = Routing(2)
    routing.kv(1, *stored(*CHAIN[:16]))
    for i in range(4):
        routing.place(names(str(i), 64))  # two each
    assert {routing.place(CHAIN[:16]).worker_id for _ in range(2)} == {1}
    routing = Routing(2)
    routing.kv(1, *stored(*CHAIN[:2]))
    routing.stats(1, num_queued_prefill_tokens=2048, num_waiting=2)
    assert routing.place(CHAIN[:2]).worker_id == 0


def test_a_hot_prefix_is_replicated_when_its_queue_costs_more_than_a_copy() -> None:
    routing = Routing(4)
    routing.kv(0, *stored(*CHAIN))
    own = [CHAIN + names(f"own{i}", 64) for i in range(16)]
    homes = [routing.place(chain).worker_id for chain in own]
    # Its worker first, then others too, and those are then as good as the first.
    assert homes[0] == 0
    assert set(homes) == {0, 1, 2, 3}
    hits = [routing.core.decision(i + 1).chosen.num_hit_blocks for i in range(16)]  # type: ignore[union-attr]
    assert sum(hit == 64 for hit in hits) >= 12


def test_twins_meet_before_the_first_is_computed() -> None:
    routing = Routing(4)
    assert len({routing.place(CHAIN).worker_id for _ in range(3)}) == 1


def test_a_faster_worker_gets_more() -> None:
    slow = FittedCostModel.prior()
    fast = FittedCostModel(
        name="fast",
        knot_ns=tuple(cost / 8 for cost in slow.knot_ns),
        seq_ns=slow.seq_ns / 8,
        logit_row_ns=slow.logit_row_ns / 8,
        attention_pair_ns=slow.attention_pair_ns / 8,
        kv_token_ns=slow.kv_token_ns / 8,
    )
    routing = Routing()
    routing.up(0, cost=slow)
    routing.up(1, cost=fast)
    counts = Counter(routing.place(num_tokens=1024).worker_id for _ in range(9))
    assert counts[1] > 5  # type: ignore[index]


def test_kv_is_fetched_where_that_is_quicker_than_to_compute_it() -> None:
    chain = CHAIN + names("own", 2)
    for bytes_per_block, may, fetches in (
        (1 << 10, True, True),
        (1 << 10, False, False),
        (1 << 32, True, False),
        (0, True, False),
    ):
        routing = Routing(kv_link="memory", fetch_kv=may)
        routing.up(0, kv_block_bytes=bytes_per_block)
        routing.up(1, kv_block_bytes=bytes_per_block)
        routing.kv(0, *stored(*CHAIN))
        routing.stats(0, num_queued_prefill_tokens=4000, num_running=1)
        chosen = routing.place(chain).decision.chosen
        if fetches:
            assert (chosen.name, chosen.fetch_from, chosen.fetch_from_id) == ("w1", "w0", 0)
            assert chosen.num_fetched_blocks == 64
            assert 0 < chosen.transfer_ms < 10
        else:
            assert (chosen.fetch_from, chosen.fetch_from_id, chosen.transfer_ms) == (
                None,
                None,
                0.0,
            )


@pytest.mark.parametrize("stopped", [0, 1])
def test_kv_is_fetched_from_one_that_has_not_stopped(stopped: int) -> None:
    routing = Routing(kv_link="memory")
    for worker_id in range(3):
        routing.up(worker_id, kv_block_bytes=1 << 10)
        if worker_id < 2:
            routing.kv(worker_id, *stored(*CHAIN))
            routing.stats(worker_id, num_queued_prefill_tokens=4000, num_running=1)
    chosen = routing.place(CHAIN, excluded=(WorkerId(stopped),)).decision.chosen
    assert (chosen.worker_id, chosen.fetch_from_id) == (2, 1 - stopped)


def test_what_is_still_to_be_computed_somewhere_is_not_fetched_from_there() -> None:
    """Twins go where they are expected, but nothing can be copied from there yet."""
    routing = Routing(kv_link="memory")
    routing.up(0, kv_block_bytes=1 << 10)
    routing.up(1, kv_block_bytes=1 << 10)
    routing.kv(0, *stored(*CHAIN[:16]))
    first = routing.place(CHAIN, excluded=(WorkerId(1),))
    again = routing.place(CHAIN, excluded=(WorkerId(0),)).decision.chosen
    assert (again.fetch_from_id, again.num_fetched_blocks, again.num_source_blocks) == (0, 16, 16)
    routing.done(2)
    routing.kv(0, *stored(*CHAIN[16:]))
    routing.started(first.request_id)
    again = routing.place(CHAIN, excluded=(WorkerId(0),)).decision.chosen
    assert (again.fetch_from_id, again.num_fetched_blocks, again.num_source_blocks) == (0, 64, 64)


def test_what_a_silent_worker_was_sent_is_fetched_when_it_is_computed() -> None:
    routing = Routing(kv_link="memory")
    routing.up(0, kv_block_bytes=1 << 10, publishes_kv=False)
    routing.up(1, kv_block_bytes=1 << 10, publishes_kv=False)
    first = routing.place(CHAIN, excluded=(WorkerId(1),))
    second = routing.place(CHAIN, excluded=(WorkerId(0),))
    assert second.decision.chosen.fetch_from_id is None
    routing.done(second.request_id)
    routing.started(first.request_id)
    assert routing.place(CHAIN, excluded=(WorkerId(0),)).decision.chosen.fetch_from_id == 0


def test_workers_without_events_are_known_by_what_they_were_sent() -> None:
    routing = Routing(index_ttl_s=120)
    routing.up(0, publishes_kv=False)
    routing.up(1, publishes_kv=False)
    home = routing.place(CHAIN).worker_id
    routing.serve(1)
    assert routing.place(CHAIN).worker_id == home
    routing.serve(2)
    assert routing.place(CHAIN).decision.chosen.num_hit_blocks == 64
    routing.serve(3)
    routing.done(99, after_ms=121_000)
    assert routing.place(CHAIN).decision.chosen.num_hit_blocks == 0


def test_another_block_size_is_no_hit_but_no_fault() -> None:
    routing = Routing()
    routing.up(0, spec=spec(block_size=SIZE * 2))
    assert routing.place(CHAIN).worker_id == 0
