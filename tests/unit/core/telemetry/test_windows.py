"""Rates over sliding windows, against sums over a list of everything that happened."""

from random import Random

import msgspec
import pytest

from headrace.core.base.events import Admitted, Arrive, Cancel, Emit, EngineEffect, Finish, Reject
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import NS_PER_S, Ns, SeqId
from headrace.core.telemetry import GoodputWindow
from headrace.core.telemetry.windows import MAX_CLASSES, OTHER_CLASS
from support.records import record_of

NOTHING = Cancel(SeqId(-1))


def by_salt(spec: SeqSpec) -> str:
    return spec.salt


class Lives:
    """Sequences that arrive, answer and end at given seconds."""

    def __init__(self) -> None:
        self.window = GoodputWindow(by_salt)
        self._next = 0

    def arrive(self, at_s: float, slo_class: str, num_prompt: int = 10) -> SeqId:
        seq_id = SeqId(self._next)
        self._next += 1
        spec = SeqSpec(
            seq_id=seq_id,
            request_id="r",
            prompt_tokens=(1,) * num_prompt,
            params=SamplingParams(),
            salt=slo_class,
        )
        self.window.observe(time(at_s), Arrive((spec,)), [])
        return seq_id

    def answer(self, at_s: float, seq_id: SeqId, num_tokens: int, *, good: bool) -> None:
        effects: list[EngineEffect] = [
            Admitted(seq_id, 0),
            Emit(seq_id, (1,) * num_tokens),
            Admitted(seq_id, 0),  # again, after a preemption
            Finish(seq_id, FinishReason.STOP, 10, num_tokens, 0, 0),
        ]
        self.window.observe(time(at_s), NOTHING, effects)
        self.window.count(time(at_s), record_of(seq_id, good=good))


def time(at_s: float) -> Ns:
    return Ns(round(at_s * NS_PER_S))


def test_rates_are_sums_over_the_seconds_that_the_window_covers() -> None:
    """Forty minutes of random traffic, so that every ring turns over several times."""
    rng, lives = Random(1), Lives()
    happened: list[tuple[float, str, bool, int]] = []
    at_s = 100.0
    lives.window.observe(time(at_s), NOTHING, [])
    while at_s < 2500.0:
        at_s += rng.expovariate(0.4) * (40 if rng.random() < 0.02 else 1)
        slo_class, good, num_tokens = rng.choice("ab"), rng.random() < 0.7, rng.randrange(1, 9)
        lives.answer(at_s, lives.arrive(at_s, slo_class), num_tokens, good=good)
        happened.append((at_s, slo_class, good, num_tokens))
        for window_s in (10, 60, 600) if rng.random() < 0.15 else ():
            for wanted in ("a", None):
                rates = lives.window.query(time(at_s), window_s, wanted)
                oldest = int(at_s) - window_s + 1
                within = [
                    h for h in happened if int(h[0]) >= oldest and (wanted is None or h[1] == "a")
                ]
                assert rates.num_finished == len(within)
                assert rates.num_good == sum(good for _, _, good, _ in within)
                span_s = max(1.0, min(at_s - oldest, at_s - 100.0))
                assert rates.window_s == pytest.approx(span_s)
                assert rates.goodput_per_s == pytest.approx(rates.num_good / span_s)
                assert rates.prompt_tokens_per_s == pytest.approx(10 * len(within) / span_s)
                tokens = sum(num_tokens for *_, num_tokens in within)
                assert rates.output_tokens_per_s == pytest.approx(tokens / span_s)


def test_an_old_second_is_forgotten_without_new_events() -> None:
    lives = Lives()
    lives.answer(5.0, lives.arrive(5.0, "a"), 1, good=True)
    assert lives.window.query(time(14.5), 10).num_good == 1
    assert lives.window.query(time(15.5), 10).num_good == 0
    assert lives.window.query(time(15.5), 60).num_good == 1
    assert lives.window.query(time(10_000.0), 600).attainment is None


def test_refusals_for_want_of_room_lower_the_attainment() -> None:
    lives = Lives()
    lives.answer(1.0, lives.arrive(1.0, "a"), 1, good=True)
    for status in (429, 503, 400):
        seq_id = lives.arrive(1.5, "a")
        lives.window.observe(time(1.5), NOTHING, [Reject(seq_id, status, "code", "")])
    rates = lives.window.query(time(2.0), 10)
    assert (rates.num_good, rates.num_refused, rates.num_finished) == (1, 2, 1)
    assert rates.attainment == pytest.approx(1 / 3)


def test_tokens_count_when_they_are_sent() -> None:
    lives = Lives()
    seq_id = lives.arrive(0.0, "a", num_prompt=30)
    lives.window.observe(time(0.5), NOTHING, [Admitted(seq_id, 0)])
    for at_s in range(1, 21):
        lives.window.observe(time(at_s), NOTHING, [Emit(seq_id, (1, 2))])
    rates = lives.window.query(time(20.0), 10)
    assert rates.output_tokens_per_s == pytest.approx(20 / 9)  # seconds 11 to 19, and 20 begins
    assert rates.prompt_tokens_per_s == 0.0
    assert rates.num_finished == 0


def test_classes_are_bounded() -> None:
    lives = Lives()
    for i in range(MAX_CLASSES + 5):
        lives.answer(1.0, lives.arrive(1.0, f"class {i}"), 1, good=True)
    assert len(list(lives.window.classes())) == MAX_CLASSES + 1
    assert lives.window.query(time(2.0), 10, OTHER_CLASS).num_good == 5
    assert lives.window.query(time(2.0), 10).num_good == MAX_CLASSES + 5
    assert lives.window.query(time(2.0), 10, "nobody").num_good == 0


@pytest.mark.parametrize("window_s", [0, 601])
def test_a_window_beyond_the_ring_is_refused(window_s: int) -> None:
    with pytest.raises(ValueError, match="not within 1 to 600"):
        GoodputWindow().query(Ns(0), window_s)


def test_a_fresh_window_is_empty() -> None:
    rates = GoodputWindow().query(Ns(0), 10)
    assert msgspec.structs.astuple(rates)[1:] == (0, 0, 0, 0.0, 0.0, 0.0, None, 0.0, 0.0)
