"""Counters count what happened, and notice what cannot have happened."""

import pytest

from headrace.core.base.errors import InvariantError
from headrace.core.base.events import (
    Admitted,
    Arrive,
    Cancel,
    Emit,
    EngineEffect,
    Finish,
    Preempted,
    Reject,
)
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import SeqId
from headrace.core.telemetry import Counters

A, B, C = SeqId(0), SeqId(1), SeqId(2)
NOTHING = Cancel(SeqId(-1))


def arrive(*ids: SeqId) -> Arrive:
    return Arrive(
        tuple(
            SeqSpec(seq_id=i, request_id="r", prompt_tokens=(1, 2), params=SamplingParams())
            for i in ids
        )
    )


def finish(seq_id: SeqId, num_output: int) -> Finish:
    return Finish(seq_id, FinishReason.STOP, 2, num_output, 1, 0)


def seen(*effects: EngineEffect) -> Counters:
    counters = Counters()
    counters.observe(arrive(A, B, C), effects)
    counters.check()
    return counters


def test_a_life_is_counted_at_every_station() -> None:
    counters = seen(Reject(C, 429, "queue_full", ""), Admitted(A, 1))
    assert (counters.num_arrived, counters.num_accepted) == (3, 2)
    assert counters.num_rejected == {"queue_full": 1}
    assert (counters.num_waiting, counters.num_running) == (1, 1)

    counters.observe(NOTHING, [Emit(A, (7, 8))])
    counters.check()
    assert (counters.num_first_tokens, counters.num_output_tokens) == (1, 2)

    counters.observe(NOTHING, [Preempted(A, "step failed", 3)])
    counters.check()
    assert counters.num_preemptions == 1
    assert (counters.num_lost_tokens, counters.num_waiting) == (3, 2)

    counters.observe(NOTHING, [Admitted(A, 0), Emit(A, (9,)), finish(A, 3), finish(B, 0)])
    counters.check()
    assert counters.num_finished == {FinishReason.STOP: 2}
    assert (counters.num_first_tokens, counters.num_answered) == (1, 1)
    assert (counters.num_prompt_tokens, counters.num_cached_tokens) == (4, 2)
    assert counters.num_waiting == counters.num_running == 0


@pytest.mark.parametrize(
    "effects",
    [
        [Admitted(A, 0), Admitted(A, 0)],
        [Preempted(A, "", 0)],
        [finish(A, 1)],  # a token was counted that nobody saw
        [Emit(A, (1,)), finish(A, 0)],
    ],
)
def test_what_cannot_happen_raises_at_once(effects: list[EngineEffect]) -> None:
    with pytest.raises(InvariantError):
        seen(*effects)


def test_a_sequence_that_ends_twice_does_not_add_up() -> None:
    counters = seen(finish(A, 0))
    counters.observe(NOTHING, [finish(A, 0)])
    with pytest.raises(InvariantError, match="sequences do not add up"):
        counters.check()


def test_tokens_after_the_end_do_not_add_up() -> None:
    counters = seen(Emit(A, (1,)), finish(A, 1), finish(B, 0))
    counters.num_first_tokens += 1
    with pytest.raises(InvariantError, match="first tokens do not add up"):
        counters.check()


def test_output_that_a_sequence_came_with_was_not_sent_here() -> None:
    counters = Counters()
    spec = SeqSpec(
        seq_id=A,
        request_id="r",
        prompt_tokens=(1, 2),
        output_tokens=(3, 4, 5),
        params=SamplingParams(),
    )
    counters.observe(Arrive((spec,)), [Admitted(A, 0), Emit(A, (6,))])
    counters.observe(NOTHING, [finish(A, 4)])
    counters.check()
    assert (counters.num_output_tokens, counters.num_first_tokens) == (1, 1)
    with pytest.raises(InvariantError, match="tokens do not add up"):
        counters.observe(Arrive((spec,)), [Admitted(A, 0), finish(A, 4), finish(A, 4)])
