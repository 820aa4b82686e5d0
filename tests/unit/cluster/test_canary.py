"""Canaries: who is asked when, whose answer is right, and what becomes of those who are wrong."""

from math import nan
from typing import Any

import msgspec
import pytest

from headrace.cluster.canary import Canaries, question_for
from headrace.cluster.fleet import Cause, Fleet, Slot
from headrace.cluster.wire import Canaried, Canary, Configure, Ready
from headrace.core.base.types import NS_PER_S, Ns
from headrace.core.config.cluster import ClusterConfig
from headrace.core.config.schema import Config
from headrace.core.engine.stats import EngineStats
from support.routing import spec
from unit.cluster.test_crew import Voice, ready

RIGHT, WRONG = ((5, 7), (-0.5, -0.25)), ((5, 8), (-0.5, -0.25))
NOT_ACCEPTED = Cause.CANARY_FAILED, "its canary was not accepted, last: full"
EVERY_S, TIMEOUT_S = 60.0, 20.0
Verdict = tuple[Cause, str] | Ready | None


class Yard:
    """Workers that say nothing by themselves."""

    def __init__(self, num_workers: int, **fields: Any) -> None:
        self.config = ClusterConfig(
            workers=num_workers, canary_every_s=EVERY_S, canary_timeout_s=TIMEOUT_S, **fields
        )
        self.fleet = Fleet(
            self.config, lambda slot: Configure(config=Config()), lambda slot: Voice()
        )
        self.fleet.start_due(Ns(0))
        self.asked: list[tuple[str, Canary]] = []
        self.canaries = Canaries(
            self.config, lambda slot, word: self.asked.append((slot.name, word))
        )
        self.now = Ns(0)

    def slot(self, index: int) -> Slot:
        return list(self.fleet)[index]

    def comes(self, index: int, **fields: Any) -> bool:
        return self.canaries.begin(self.now, self.slot(index), ready(**fields))

    def says(self, index: int, answer: Any = RIGHT, **fields: Any) -> Verdict:
        """To the last canary that it has got."""
        slot = self.slot(index)
        word = next(word for name, word in reversed(self.asked) if name == slot.name)
        tokens, logprobs = answer
        return self.canaries.hear(
            self.now, slot, Canaried(word.canary_id, tokens, logprobs, **fields)
        )

    def serves(self, *indices: int) -> None:
        for index in indices:
            assert self.comes(index)
            assert isinstance(self.says(index), Ready)

    def wait(self, seconds: float) -> list[tuple[str, Cause]]:
        """Who is lost then."""
        self.now = Ns(self.now + round(seconds * NS_PER_S))
        return [(slot.name, cause) for slot, cause, _ in self.canaries.turn(self.now, self.fleet)]


def steps(num_steps: int) -> EngineStats:
    empty = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 0))
    return msgspec.structs.replace(empty, num_steps=num_steps)


def test_the_first_answer_is_what_others_have_to_say() -> None:
    yard = Yard(3)
    yard.serves(0, 1)
    assert yard.comes(2)
    assert yard.canaries.is_tried(yard.slot(2))
    assert yard.says(2, WRONG) == (
        Cause.CANARY_WRONG,
        "its canary is wrong: token 1 of its answer is 8, and 7 of the others'",
    )


def test_a_bit_of_a_probability_is_enough() -> None:
    yard = Yard(2)
    yard.serves(0)
    yard.comes(1)
    verdict = yard.says(1, (RIGHT[0], (-0.5, -0.2500001)))
    assert verdict == (
        Cause.CANARY_WRONG,
        "its canary is wrong: token 1 of its answer has logprob -0.2500001, and -0.25"
        " in the others'",
    )


def test_what_is_no_number_is_wrong_though_it_be_the_first() -> None:
    yard = Yard(2)
    yard.comes(0)
    verdict = yard.says(0, ((5, 7), (nan, nan)))
    assert isinstance(verdict, tuple)
    assert verdict[0] is Cause.CANARY_WRONG
    yard.serves(1)


def test_two_know_better_than_the_first() -> None:
    yard = Yard(3)
    yard.comes(0)
    assert isinstance(yard.says(0, WRONG), Ready)
    yard.comes(1)
    assert isinstance(yard.says(1), tuple)  # nobody knows yet who of them is wrong
    assert yard.wait(0) == []
    yard.comes(2)
    assert isinstance(yard.says(2), Ready)
    assert yard.wait(0) == [("w0", Cause.CANARY_WRONG)]


def test_one_that_was_right_once_is_not_believed_alone() -> None:
    """A lone worker whose next life answers something else is no majority."""
    yard = Yard(1)
    yard.serves(0)
    for _ in range(3):
        yard.fleet.lose(yard.slot(0), yard.now, Cause.ENDED, "struck")
        yard.wait(1000)
        yard.fleet.start_due(yard.now)
        yard.comes(0)
        assert isinstance(yard.says(0, WRONG), tuple)


def test_backends_that_cannot_keep_their_bytes_have_to_answer_only() -> None:
    yard = Yard(2)
    loose = {"batch_invariant": False}
    _, num_tokens = question_for(spec())
    for index, token in enumerate((1, 2)):
        yard.comes(index, **loose)
        assert isinstance(yard.says(index, ((token,) * num_tokens, (0.0,) * num_tokens)), Ready)
    yard.wait(EVERY_S)
    assert yard.says(1, ((1,), (0.0,))) == (
        Cause.CANARY_WRONG,
        "its canary is wrong: it is too short",
    )


def test_who_is_quiet_is_asked_again_and_who_works_is_not() -> None:
    yard = Yard(2)
    yard.serves(0, 1)
    yard.asked.clear()
    yard.wait(EVERY_S - 1)
    yard.canaries.note(yard.now, yard.slot(0), steps(4))
    yard.canaries.note(yard.now, yard.slot(1), steps(0))  # a beat, and nothing done
    assert yard.canaries.next_ns() == yard.now + NS_PER_S
    yard.wait(1)
    assert [name for name, _ in yard.asked] == ["w1"]
    assert yard.says(1) is None
    yard.wait(EVERY_S - 1)
    assert [name for name, _ in yard.asked] == ["w1", "w0"]
    assert yard.says(0, WRONG) == (
        Cause.CANARY_WRONG,
        "its canary is wrong: token 1 of its answer is 8, and 7 of the others'",
    )


def test_who_does_not_move_is_hung_and_who_is_slow_is_not() -> None:
    yard = Yard(2)
    yard.serves(0, 1)
    yard.wait(EVERY_S)
    for num_steps in range(1, 4):
        yard.canaries.note(yard.now, yard.slot(0), steps(num_steps))
        yard.canaries.note(yard.now, yard.slot(1), steps(7))
        lost = yard.wait(TIMEOUT_S - 1)
        assert lost == ([] if num_steps == 1 else [("w1", Cause.CANARY_LATE)])


def test_one_that_never_answers_never_serves() -> None:
    yard = Yard(1)
    yard.comes(0)
    assert yard.wait(TIMEOUT_S - 1) == []
    assert yard.wait(1) == [("w0", Cause.CANARY_LATE)]


def test_one_that_has_no_room_for_it_is_asked_again() -> None:
    yard = Yard(1)
    yard.comes(0)
    assert yard.says(0, ((), ()), fault="full", is_refused=True) is None
    yard.wait(1)
    assert len(yard.asked) == 2
    yard.wait(TIMEOUT_S - 2)
    # It is busy, with what another front end asks: that is no fault.
    yard.canaries.note(yard.now, yard.slot(0), steps(1))
    assert yard.says(0, ((), ()), fault="full", is_refused=True) is None
    for _ in range(round(TIMEOUT_S) - 1):
        assert yard.wait(1) == []
        assert yard.says(0, ((), ()), fault="full", is_refused=True) is None
    yard.wait(1)
    assert yard.says(0, ((), ()), fault="full", is_refused=True) == NOT_ACCEPTED


def test_one_that_hangs_and_has_no_room_is_lost() -> None:
    yard = Yard(1)
    yard.serves(0)
    yard.wait(EVERY_S)
    for _ in range(round(TIMEOUT_S)):
        assert yard.says(0, ((), ()), fault="full", is_refused=True) is None
        yard.wait(1)
    assert yard.says(0, ((), ()), fault="full", is_refused=True) == NOT_ACCEPTED


def test_one_that_is_busy_after_all_is_left_alone() -> None:
    yard = Yard(1)
    yard.serves(0)
    yard.wait(EVERY_S)
    assert yard.says(0, ((), ()), fault="full", is_refused=True) is None
    yard.canaries.note(yard.now, yard.slot(0), steps(1))
    yard.wait(EVERY_S - 1)
    assert len(yard.asked) == 2
    yard.wait(1)
    assert len(yard.asked) == 3
    # The time that it has begins anew.
    yard.wait(TIMEOUT_S - 1)
    assert yard.says(0, ((), ()), fault="full", is_refused=True) is None


def test_a_step_that_fails_says_why() -> None:
    yard = Yard(1)
    yard.comes(0)
    verdict = yard.says(0, ((), ()), fault="a kernel failed")
    assert verdict == (Cause.CANARY_FAILED, "its canary failed: a kernel failed")


def test_an_answer_to_another_canary_says_nothing() -> None:
    yard = Yard(1)
    yard.comes(0)
    other = Canaried(99, *RIGHT)
    assert yard.canaries.hear(yard.now, yard.slot(0), other) is None
    assert yard.canaries.is_tried(yard.slot(0))


def test_those_that_leave_are_not_asked() -> None:
    yard = Yard(1)
    yard.serves(0)
    yard.asked.clear()
    yard.fleet.leave(yard.slot(0), Ns(10**15), comes_back=False)
    assert yard.canaries.next_ns() is None
    yard.wait(10 * EVERY_S)
    assert yard.asked == []


def test_without_canaries_everybody_serves_at_once() -> None:
    yard = Yard(1, canary=False)
    assert not yard.comes(0)
    assert yard.canaries.next_ns() is None


@pytest.mark.parametrize(
    ("fields", "num_prompt", "num_tokens"),
    [
        ({}, 40, 8),
        ({"num_blocks": 2}, 24, 8),
        ({"max_model_len": 8}, 6, 2),
        ({"max_model_len": 2}, 1, 1),
    ],
)
def test_a_question_fits_into_any_worker(
    fields: dict[str, Any], num_prompt: int, num_tokens: int
) -> None:
    one = spec(**fields)
    prompt, wanted = question_for(one)
    assert (len(prompt), wanted) == (num_prompt, num_tokens)
    assert all(0 <= token < one.vocab_size for token in prompt)
