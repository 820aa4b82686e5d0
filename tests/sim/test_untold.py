"""Which of an engine's words wait, and that none is lost or told twice."""

from headrace.core.base.events import Admitted, Emit, Finish, Preempted
from headrace.core.base.request import FinishReason
from headrace.core.base.types import Ns, SeqId
from headrace.core.router.front import PROGRESS_TOKENS
from headrace.sim.untold import Untold

ONE, OTHER = SeqId(1), SeqId(2)


def emit(seq_id: SeqId, token: int) -> Emit:
    return Emit(seq_id, (token,))


def end(seq_id: SeqId) -> Finish:
    return Finish(seq_id, FinishReason.LENGTH, 1, 1, 0, 0)


def test_a_reader_hears_the_first_token_at_once_and_then_as_often_as_the_router_does() -> None:
    untold = Untold()
    told = [
        (at, untold.filter(Ns(at), [emit(ONE, at)])) for at in range(1, 2 * PROGRESS_TOKENS + 1)
    ]
    heard = {at: effects for at, (effects, _) in told if effects}
    first, second = PROGRESS_TOKENS, 2 * PROGRESS_TOKENS
    assert heard == {
        1: [emit(ONE, 1)],
        first: [Emit(ONE, tuple(range(2, first + 1)))],
        second: [Emit(ONE, tuple(range(first + 1, second + 1)))],
    }
    assert told[first - 1][1][1] == {ONE: ()}  # their times wait
    assert untold.filter(Ns(40), [end(ONE)])[1] == {ONE: list(range(2, second + 1))}


def test_what_waits_is_told_before_an_end_and_before_a_preemption() -> None:
    untold = Untold()
    untold.filter(Ns(0), [Admitted(ONE, 0), emit(ONE, 7), emit(OTHER, 9)])
    untold.filter(Ns(1), [emit(ONE, 8), emit(OTHER, 10)])
    lost = Preempted(OTHER, "no room", 3)
    effects, times = untold.filter(Ns(2), [emit(ONE, 11), end(ONE), lost])
    assert effects == [Emit(ONE, (8, 11)), end(ONE), Emit(OTHER, (10,)), lost]
    assert times == {ONE: [1, 2], OTHER: [1]}


def test_what_was_added_is_told_up_to_a_time() -> None:
    untold = Untold()
    untold.filter(Ns(0), [emit(ONE, 7)])
    untold.add(ONE, (8, 9), (Ns(1), Ns(2)))
    assert untold.num_until_told(ONE) == PROGRESS_TOKENS - 3
    assert untold.take_until(Ns(1)) == [(emit(ONE, 8), [1])]
    assert untold.take(ONE) == emit(ONE, 9)
    assert untold.take_until(Ns(1)) == []
    assert untold.take_until(Ns(2)) == [(Emit(ONE, ()), [2])]
    untold.add(ONE, (10,), (Ns(3),))
    assert untold.end(ONE) == (emit(ONE, 10), [3])


def test_what_nobody_has_heard_is_told_up_to_a_time() -> None:
    """Words that were under way: of one that decodes, of one that has ended, and a first token."""
    untold, third = Untold(), SeqId(3)
    untold.filter(Ns(0), [emit(ONE, 0), emit(OTHER, 0)])
    untold.add(ONE, (1, 2), (Ns(1), Ns(2)))
    untold.add(OTHER, (1, 2), (Ns(1), Ns(2)))
    under_way = [untold.take(ONE)], {ONE: ()}
    untold.add(ONE, (3,), (Ns(3),))
    ended = untold.filter(Ns(3), [emit(OTHER, 3), end(OTHER), emit(third, 9)])
    for words, times in (ended, under_way):
        untold.put_back(words, times)
    assert untold.take_until(Ns(2)) == [(Emit(ONE, (1, 2)), [1, 2]), (Emit(OTHER, (1, 2)), [1, 2])]
    assert untold.take_until(Ns(3)) == [(emit(ONE, 3), [3]), (emit(OTHER, 3), [3])]
