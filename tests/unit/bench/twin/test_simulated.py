"""Requests are those that were sent, and parts are as fast as the pieces around them say."""

from pathlib import Path

import msgspec
import pytest

from headrace.bench.client import Answer
from headrace.bench.twin.__main__ import main
from headrace.bench.twin.cases import CASES, Case
from headrace.bench.twin.session import ANSWERS, Session, recorded
from headrace.bench.twin.simulated import NUM_SEEDS, run_simulated, simulate_session
from headrace.core.base.errors import ConfigError
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.cost.contention import TimedStep
from headrace.core.cost.fitted import FittedCostModel
from headrace.core.cost.model import StepShape
from headrace.live.step_log import LoggedTimes, read_logs
from support.calibrations import calibration_of, write_log

MS = 1_000_000
PRIOR = FittedCostModel.prior()


def answer(sent_ms: float, num_output: int = 5) -> Answer:
    sent = round(sent_ms * MS)
    return Answer(
        sent_ns=Ns(sent),
        first_token_ns=Ns(sent + 50 * MS),
        last_token_ns=Ns(sent + 90 * MS),
        num_prompt_tokens=20,
        num_output_tokens=num_output,
        num_cached_tokens=0,
    )


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[-1]])
def test_simulated_requests_are_those_that_were_sent(case: Case) -> None:
    live = [answer(100.0 * place, 5 + place) for place in range(12)]
    sent = [(one, range(place, place + 20)) for place, one in enumerate(live)]
    records = run_simulated(case, calibration_of(num_workers=case.num_workers), sent, 4)
    assert sorted(one.num_output_tokens for one in records) == [5 + place for place in range(4, 12)]
    moments = sorted(one.arrived_ns for one in records)
    assert moments[1] - moments[0] == 100 * MS
    # The way to the engine and back is part of what a client sees.
    assert min(one.ttft_ns or 0 for one in records) > 11 * MS


def test_a_part_is_as_fast_as_the_pieces_around_it(tmp_path: Path) -> None:
    """Twice as slow from the second piece on; what was logged within parts is not looked at."""
    write_log(tmp_path / "log", num_seqs=4)
    times = LoggedTimes(read_logs([tmp_path / "log"]).header)
    pieces, parts = [], []
    for place in range(4):
        begin_ms = 100_000.0 * place
        pieces.append([answer(begin_ms)])
        parts.append([answer(begin_ms + 50_000 + 100 * one) for one in range(5)])
        slow = 2.0 if place else 1.0
        times.steps += steps(begin_ms, slow) + steps(begin_ms + 50_000, 99.0)
    session = Session(span_s=60.0, load_average=0.0, pieces=pieces, parts=parts[:3])
    prompts = [[list(range(20))] for _ in pieces]
    asked = [[list(range(30 * one, 30 * one + 20)) for one in range(5)] for _ in parts[:3]]
    found = simulate_session(CASES[0], session, times, prompts, asked)
    first, *others = found.slowness
    assert others == pytest.approx([2 * first] * 3, rel=1e-3)
    assert [len(one) for one in found.runs] == [15] * NUM_SEEDS
    tpots = [one.tpot_ns or 0.0 for one in found.runs[0]]
    assert sum(tpots[10:]) / sum(tpots[:5]) == pytest.approx(2.0 / 1.5, rel=0.1)


def steps(begin_ms: float, slow: float) -> list[TimedStep]:
    found, now = [], round(begin_ms * MS)
    for num_tokens in (1, 2, 4, 60, 200) * 6:
        shape = StepShape(num_tokens, 1, 1, num_tokens * 50, 50)
        took = round(slow * PRIOR.step_ns(shape) / 30)
        found.append(
            TimedStep(
                worker=0, begin_ns=Ns(now), end_ns=Ns(now + took), device_ns=Ns(took), shape=shape
            )
        )
        now += took
    return found


def test_a_case_that_is_not_whole_is_not_there(tmp_path: Path) -> None:
    assert recorded(tmp_path, 60.0) is None
    write_log(tmp_path / "events.log", num_seqs=4)
    (tmp_path / ANSWERS).write_bytes(b"{")
    assert recorded(tmp_path, 60.0) is None
    session = Session(span_s=60.0, load_average=0.0, pieces=[], parts=[[answer(1.0)]])
    (tmp_path / ANSWERS).write_bytes(msgspec.json.encode(session))
    kept = recorded(tmp_path, 60.0)
    assert kept is not None
    assert kept[0] == session
    assert len(kept[1].requests) == 4
    assert recorded(tmp_path, 36.0) is None  # a load of another length


def test_what_cannot_be_asked_for_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such case: chat, 9"):
        main(["chat, 9", "--out", str(tmp_path / "out.json")])
    with pytest.raises(ConfigError, match="say 3 to 3600"):
        main(["chat, 1", "--span-s", "nan"])
    with pytest.raises(ConfigError, match="cannot be written: is a directory"):
        main(["chat, 1", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"the table is FILE\.md beside it"):
        main(["chat, 1", "--out", str(tmp_path / "out.md")])


def test_moments_of_a_window(tmp_path: Path) -> None:
    write_log(tmp_path / "log", num_seqs=6)
    times = read_logs([tmp_path / "log"])
    middle = times.steps[len(times.steps) // 2].begin_ns
    before = times.between(Ns(0), middle)
    after = times.between(middle, Ns(10**6 * NS_PER_S))
    assert before.steps + after.steps == times.steps
    assert {**before.requests, **after.requests} == times.requests
    assert len(LoggedTimes.joined([before, after]).steps) == len(times.steps)
