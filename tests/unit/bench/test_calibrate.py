"""What clients saw and what logs tell are put together, request by request."""

from pathlib import Path

import pytest

from headrace.bench.calibrate import (
    calibration_of,
    host_of,
    link_of,
    matched,
    not_crowded,
    shapes_of,
)
from headrace.bench.client import Answer
from headrace.core.base.types import Ns
from headrace.live.step_log import CopyTime, LoggedTimes, SeenRequest, read_logs
from support.calibrations import write_log

MS = 1_000_000


def answer(sent_ms: float, first_ms: float, last_ms: float, num_prompt: int) -> Answer:
    return Answer(
        sent_ns=Ns(round(sent_ms * MS)),
        first_token_ns=Ns(round(first_ms * MS)),
        last_token_ns=Ns(round(last_ms * MS)),
        num_prompt_tokens=num_prompt,
        num_output_tokens=5,
        num_cached_tokens=0,
    )


def seen(num_prompt: int, *moments_ms: float) -> SeenRequest:
    """Come, arrived, first and last token."""
    come, arrived, first, last = (Ns(round(ms * MS)) for ms in moments_ms)
    return SeenRequest(num_prompt, come, arrived, first, last)


@pytest.fixture
def times(tmp_path: Path) -> LoggedTimes:
    write_log(tmp_path / "log", num_seqs=6)
    return read_logs([tmp_path / "log"])


def test_the_way_to_the_engine_and_back(times: LoggedTimes) -> None:
    times.requests = {
        "a": [seen(100, 3, 5, 50, 90)],
        "b": [seen(200, 1003, 1006, 1050, 1090)],
        "long before": [seen(100, 0.5, 1, 2, 3)],
    }
    answers = [answer(1000, 1056, 1092, 200), answer(1, 56, 92, 100)]
    assert [seq.come_ns // MS for _, seq in matched(times, answers)] == [3, 1003]
    host = host_of(times, answers, message_ns=0.0)
    assert host.has_client
    # 4 ms with 100 tokens, 6 ms with 200.
    assert host.request.at(300) == 8 * MS
    assert host.first_token_ns == 6 * MS
    assert host.token_ns == 2 * MS
    # Of workers, the simulation counts the message to them by itself.
    assert host_of(times, answers, message_ns=1.0 * MS).first_token_ns == 5 * MS


def test_requests_in_a_crowd_are_left_out_where_there_are_others(times: LoggedTimes) -> None:
    crowd = [(answer(at, 50, 60, 9), seen(9, at + 1, at + 2, 40, 50)) for at in (0, 1, 2, 3)]
    alone = (answer(500, 550, 560, 9), seen(9, 501, 502, 540, 550))
    assert not_crowded([*crowd, alone]) == [alone]
    assert not_crowded(crowd) == crowd


def test_servers_that_were_recorded_twice_are_one_calibration(tmp_path: Path) -> None:
    recorded = []
    for seed in (1, 2):
        write_log(tmp_path / "log", seed=seed)
        recorded.append(read_logs([tmp_path / "log"]))
    both = calibration_of(LoggedTimes.joined(recorded), (), num_workers=1, source="both")
    assert both.steps.num_samples == sum(len(one.steps) for one in recorded)
    assert not both.host.has_client
    assert both.host.request.at(50) == pytest.approx(5 * MS, rel=1e-3)
    assert both.host.server == both.host.request
    assert both.kv_link is None


def test_copies_of_kv_keep_their_mean(times: LoggedTimes) -> None:
    """A start and a time for each block; one that was held up counts as much as the others."""
    times.copies = [
        CopyTime(blocks, Ns(round((4 + 0.5 * blocks) * MS)), Ns(0)) for blocks in range(1, 20)
    ]
    link = link_of(times)
    assert link is not None
    assert (link.latency_ns, link.byte_ns) == pytest.approx((4 * MS, 0.5 * MS), rel=1e-3)
    times.copies.append(CopyTime(10, Ns(109 * MS), Ns(0)))
    late = link_of(times)
    assert late is not None
    assert late.latency_ns + 10 * late.byte_ns == pytest.approx(14 * MS, rel=1e-3)
    times.copies = times.copies[:7]
    assert link_of(times) is None


@pytest.mark.parametrize("num_workers", [1, 3])
def test_rounds_reach_what_loads_ask_and_stay_small(num_workers: int) -> None:
    rounds = shapes_of(num_workers)
    flat = [shape for one in rounds for shape in one]
    assert max(num_prompt for _, num_prompt, _ in flat) == 1200
    assert max(map(len, rounds)) == 16 * num_workers
    # Half a minute for each worker, at a thousand tokens a second.
    assert sum(num_prompt for _, num_prompt, _ in flat) < 20_000 * num_workers
