"""Front ends number their sequences alone: no scope tells or touches what is another's."""

import pytest

from headrace.core.base.errors import TransferError
from headrace.core.base.events import Admitted, Emit, Finish, Reject
from headrace.core.base.request import FinishReason, SeqSpec
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import SeqId
from headrace.core.engine.scope import Scope


def spec(seq_id: int, *, is_leased: bool = False) -> SeqSpec:
    return SeqSpec(
        seq_id=SeqId(seq_id),
        request_id=f"r{seq_id}",
        prompt_tokens=(1, 2),
        params=SamplingParams(),
        is_leased=is_leased,
    )


def finish(seq_id: int, reason: FinishReason = FinishReason.LENGTH) -> Finish:
    return Finish(SeqId(seq_id), reason, 2, 1, 0, 0)


def test_two_front_ends_use_the_same_ids() -> None:
    one, two = Scope(), Scope()
    assert [inward.seq_id for inward in one.enter([spec(0), spec(1)], [10, 11])] == [10, 11]
    assert [inward.seq_id for inward in two.enter([spec(0)], [12])] == [12]
    assert one.outward(Emit(SeqId(11), (5,))) == Emit(SeqId(1), (5,))
    assert two.outward(Emit(SeqId(11), (5,))) is None
    assert (one.inner(SeqId(0)), two.inner(SeqId(0)), two.inner(SeqId(1))) == (10, 12, None)
    assert SeqId(12) in two
    assert SeqId(12) not in one
    assert one.living() == [10, 11]


def test_a_request_has_come_once_and_to_its_own_front_end() -> None:
    one, two = Scope(), Scope()
    one.enter([spec(0), spec(1)], [10, 11])
    one.outward(Reject(SeqId(10), 503, "", ""))  # the engine's word may come before its arrival
    assert not two.has_come(SeqId(10))
    assert [one.has_come(SeqId(number)) for number in (11, 10, 10)] == [False, True, False]


def test_the_last_word_frees_the_id_for_another_one() -> None:
    scope = Scope()
    scope.enter([spec(0)], [10])
    assert scope.outward(Admitted(SeqId(10), 0)) == Admitted(SeqId(0), 0)
    with pytest.raises(TransferError, match="sequence id 0 twice"):
        scope.enter([spec(0)], [11])
    assert scope.outward(finish(10)) == finish(0)
    assert scope.outward(finish(10)) is None
    assert scope.living() == []
    scope.enter([spec(0)], [11])
    assert scope.inner(SeqId(0)) == 11


def test_a_sequence_that_is_announced_keeps_its_id_and_counts_once() -> None:
    scope = Scope()
    assert scope.expect(SeqId(0), 10) == 10
    with pytest.raises(TransferError, match="announces sequence id 0 twice"):
        scope.expect(SeqId(0), 11)
    assert scope.expected(SeqId(0)) == 10
    assert scope.held() == [10]
    assert scope.has_come(SeqId(10))
    inward = scope.enter([spec(1), spec(0)], [20, 21])
    assert [one.seq_id for one in inward] == [20, 10]
    assert not scope.has_come(SeqId(20))
    assert scope.expected(SeqId(0)) is None
    assert scope.held() == []


def test_one_that_will_not_come_is_forgotten() -> None:
    scope = Scope()
    scope.expect(SeqId(0), 10)
    assert scope.end_lease(SeqId(0)) == 10
    assert scope.end_lease(SeqId(0)) is None
    assert [one.seq_id for one in scope.enter([spec(0)], [20])] == [20]
    assert scope.has_come(SeqId(20))


@pytest.mark.parametrize("reason", FinishReason)
def test_what_ends_by_itself_under_a_lease_is_lent_until_its_end(reason: FinishReason) -> None:
    scope = Scope()
    scope.enter([spec(0, is_leased=True), spec(1)], [10, 11])
    assert scope.end_lease(SeqId(0)) is None  # it has nothing to lend yet
    scope.outward(finish(10, reason))
    scope.outward(finish(11, reason))
    lent = [10] if reason is FinishReason.LENGTH else []
    assert scope.held() == lent
    assert scope.end_lease(SeqId(1)) is None
    assert scope.end_lease(SeqId(0)) == (10 if lent else None)
    assert scope.end_lease(SeqId(0)) is None
    assert scope.held() == []
