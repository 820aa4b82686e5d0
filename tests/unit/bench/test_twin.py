"""The same requests on both sides; figures and their errors; a file that cannot be asked for."""

from pathlib import Path
from zlib import crc32

import pytest

from headrace.bench.client import Answer
from headrace.bench.twin import (
    BURSTS,
    CASES,
    SHARED,
    Case,
    asks_of,
    compare,
    line,
    main,
    run_simulated,
)
from headrace.core.base.types import Ns
from support.calibrations import calibration_of


def encode(text: str) -> list[int]:
    """A word is a token."""
    return [crc32(word.encode()) % 1000 for word in text.split()]


def answer(sent_ms: float, ttft_ms: float, tpot_ms: float, num_output: int) -> Answer:
    sent = round(sent_ms * 1e6)
    first = sent + round(ttft_ms * 1e6)
    return Answer(
        sent_ns=Ns(sent),
        first_token_ns=Ns(first),
        last_token_ns=Ns(first + round((num_output - 1) * tpot_ms * 1e6)),
        num_prompt_tokens=20,
        num_output_tokens=num_output,
        num_cached_tokens=0,
    )


def test_loads_are_the_same_again_and_share_what_they_should() -> None:
    asks = asks_of(SHARED, encode)
    assert asks == asks_of(SHARED, encode)
    beginnings = {tuple(encode(ask.prompt)[: SHARED.shared]) for ask in asks}
    assert len(beginnings) <= SHARED.num_groups < len(asks)
    bursts = asks_of(BURSTS, encode)
    assert len(bursts) == BURSTS.burst * len({ask.at_s for ask in bursts})


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[-1]])
def test_simulated_requests_are_those_that_were_sent(case: Case) -> None:
    live = [answer(100.0 * place, 50.0, 10.0, 5 + place) for place in range(12)]
    prompts = [list(range(place, place + 20)) for place in range(12)]
    calibration = calibration_of(num_workers=case.num_workers)
    sim = run_simulated(case, calibration, prompts, live)
    assert sorted(one.num_output_tokens for one in sim) == [5 + place for place in range(12)]
    assert sorted(one.sent_ns for one in sim)[1] - min(one.sent_ns for one in sim) == 100_000_000
    # The way to the engine and back is part of what a client sees.
    assert min(one.ttft_ns for one in sim) > 11_000_000


def test_errors_are_relative_and_misses_are_marked() -> None:
    live = [answer(0.0, 100.0, 10.0, 11), answer(1000.0, 100.0, 10.0, 11)]
    case = CASES[0]
    prompts = [list(range(20)), list(range(30, 50))]
    row = compare("case", 1.0, live, run_simulated(case, calibration_of(), prompts, live))
    assert row.live.ttft_ms == row.live.ttft_ms_p99 == 100.0
    assert row.live.e2e_ms == pytest.approx(200.0)
    for figure, error in row.errors.items():
        assert error == pytest.approx(
            getattr(row.simulated, figure) / getattr(row.live, figure) - 1.0
        )
        limit = 0.2 if figure.endswith("p99") else 0.1
        assert (figure in row.missed) == (abs(error) > limit)
    assert row.missed
    assert line(row).count("**") == 2 * len(row.missed)


def test_cases_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such case: chat, 9"):
        main(["chat, 9", "--out", str(tmp_path / "out.json")])
