"""From tokens to text: what goes out when, and what a stop string does to it."""

from collections.abc import Sequence

import pytest

from headrace.core.base.events import Emit, Finish
from headrace.core.base.plan import TokenLogprob
from headrace.core.base.request import FinishReason
from headrace.core.base.sampling import SamplingParams
from headrace.core.base.types import SeqId
from headrace.live.choice import Choice, ChoiceDelta
from headrace.models.text.detokenizer import Detokenizer
from headrace.models.text.stops import StopMatcher
from support.fake_engine import IM_END as EOS
from support.fake_engine import IM_START, byte_tokenizer

TOKENIZER = byte_tokenizer()
ID = SeqId(0)


def choice(
    *stops: str,
    include: bool = False,
    hidden: Sequence[int] = (EOS,),
    skip_special: bool = True,
    **params: object,
) -> Choice:
    return Choice(
        0,
        SamplingParams(**params),  # type: ignore[arg-type]
        num_prompt_tokens=5,
        hidden_tokens=frozenset(hidden),
        detokenizer=Detokenizer(TOKENIZER, skip_special=skip_special),
        stops=StopMatcher(stops, include=include),
    )


def feed(
    choice: Choice,
    tokens: Sequence[int],
    reason: FinishReason = FinishReason.LENGTH,
    stop_token_id: int | None = None,
) -> list[ChoiceDelta]:
    """One token at a time, then the end, up to the first finish."""
    deltas: list[ChoiceDelta] = []
    choice.admit(3)
    for token in tokens:
        delta = choice.emit(Emit(ID, (token,), (TokenLogprob(token, -token / 10, 0),)))
        if delta is not None:
            deltas.append(delta)
            if delta.finish is not None:
                return deltas
    deltas.append(choice.finish(Finish(ID, reason, 5, len(tokens), 3, 0, stop_token_id)))
    return deltas


def text_of(deltas: Sequence[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: Sequence[ChoiceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def assert_aligned(deltas: Sequence[ChoiceDelta]) -> None:
    for delta in deltas:
        assert tuple(logprob.token_id for logprob in delta.logprobs) == delta.token_ids
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_each_token_goes_out_with_its_text() -> None:
    deltas = feed(choice(), b"abc")
    assert [(delta.text, delta.token_ids) for delta in deltas] == [
        ("a", (97,)),
        ("b", (98,)),
        ("c", (99,)),
        ("", ()),
    ]
    assert_aligned(deltas)
    finish = deltas[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason) == (FinishReason.LENGTH, None)
    counts = (finish.num_prompt_tokens, finish.num_output_tokens, finish.num_cached_tokens)
    assert counts == (5, 3, 3)


def test_a_character_of_several_tokens_goes_out_whole() -> None:
    deltas = feed(choice(), "aé€".encode())
    assert [(delta.text, len(delta.token_ids)) for delta in deltas] == [
        ("a", 1),
        ("é", 2),
        ("€", 3),
        ("", 0),
    ]
    assert_aligned(deltas)


def test_a_character_that_never_completes_ends_as_a_replacement() -> None:
    deltas = feed(choice(), "a€".encode()[:-1])
    assert [(delta.text, len(delta.token_ids)) for delta in deltas] == [("a", 1), ("\ufffd", 2)]
    assert_aligned(deltas)


def test_a_stop_string_ends_the_choice_and_is_no_text() -> None:
    deltas = feed(choice("END"), b"abENDcd")
    assert text_of(deltas) == "ab"
    assert tokens_of(deltas) == list(b"abEND")
    assert_aligned(deltas)
    finish = deltas[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason, finish.num_output_tokens) == (
        FinishReason.STOP,
        "END",
        5,
    )
    assert finish.num_cached_tokens == 3


def test_an_included_stop_string_is_text() -> None:
    deltas = feed(choice("END", include=True), b"abENDcd")
    assert text_of(deltas) == "abEND"
    assert_aligned(deltas)


def test_held_back_text_and_its_tokens_go_out_when_it_is_no_stop() -> None:
    deltas = feed(choice("END"), b"aENx")
    assert [(delta.text, delta.token_ids) for delta in deltas] == [
        ("a", (97,)),
        ("ENx", tuple(b"ENx")),
        ("", ()),
    ]
    assert_aligned(deltas)


def test_held_back_text_goes_out_at_the_end() -> None:
    deltas = feed(choice("END"), b"aEN")
    assert [(delta.text, delta.token_ids) for delta in deltas] == [
        ("a", (97,)),
        ("EN", tuple(b"EN")),
    ]
    assert_aligned(deltas)


def test_a_stop_string_may_cross_tokens_and_end_within_one() -> None:
    one = choice("bc")
    delta = one.emit(Emit(ID, tuple(b"abcdef")))
    assert delta is not None
    assert delta.finish is not None
    assert (delta.text, delta.token_ids) == ("a", tuple(b"abc"))
    assert delta.finish.num_output_tokens == 3


def test_no_stop_string_ends_a_choice_before_min_tokens() -> None:
    assert text_of(feed(choice("b", min_tokens=2), b"abc")) == "a"
    assert text_of(feed(choice("b", min_tokens=3), b"abcb")) == "abc"
    assert text_of(feed(choice("ab", min_tokens=2), b"abcabx")) == "abc"


def test_the_end_token_is_no_text_but_counts() -> None:
    deltas = feed(choice(), [*b"ab", EOS], FinishReason.STOP, EOS)
    assert text_of(deltas) == "ab"
    assert tokens_of(deltas) == [*b"ab", EOS]
    finish = deltas[-1].finish
    assert finish is not None
    assert (finish.stop_reason, finish.num_output_tokens) == (None, 3)


def test_a_stop_token_is_the_reason_and_no_text() -> None:
    one = choice(hidden=(EOS, 99), stop_token_ids=(99,))
    deltas = feed(one, b"abc", FinishReason.STOP, 99)
    assert text_of(deltas) == "ab"
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.stop_reason == 99


def test_special_tokens_are_text_where_they_are_not_skipped() -> None:
    assert text_of(feed(choice(), [IM_START, 97])) == "a"
    assert text_of(feed(choice(skip_special=False), [IM_START, 97])) == "<|im_start|>a"


def test_prompt_log_probabilities_go_out_at_once() -> None:
    scores = (TokenLogprob(1, -1.0, 0), TokenLogprob(2, -2.0, 1))
    one = choice()
    first = one.emit(Emit(ID, (), (), scores[:1]))
    second = one.emit(Emit(ID, (97,), (), scores[1:]))
    assert first is not None
    assert second is not None
    assert (first.text, first.token_ids, first.prompt_logprobs) == ("", (), scores[:1])
    assert (second.text, second.prompt_logprobs) == ("a", scores[1:])


def test_an_error_is_passed_on() -> None:
    one = choice("ax")
    assert one.emit(Emit(ID, (97,))) is None
    delta = one.finish(Finish(ID, FinishReason.ERROR, 0, 0, 0, 0, error="device on fire"))
    assert (delta.text, delta.token_ids) == ("a", (97,))
    assert delta.finish is not None
    assert (delta.finish.error, delta.finish.num_output_tokens) == ("device on fire", 1)


@pytest.mark.parametrize("stop", ["ab", "abc", "€", "zz"])
def test_any_cut_of_the_tokens_gives_the_same_whole(stop: str) -> None:
    tokens = tuple("xab€abcdé".encode())
    whole: set[tuple[str, tuple[int, ...]]] = set()
    for size in range(1, len(tokens) + 1):
        one, deltas = choice(stop), list[ChoiceDelta]()
        for start in range(0, len(tokens), size):
            delta = one.emit(Emit(ID, tokens[start : start + size]))
            deltas += [delta] if delta is not None else []
            if deltas and deltas[-1].finish is not None:
                break
        else:
            deltas.append(one.finish(Finish(ID, FinishReason.LENGTH, 5, len(tokens), 0, 0)))
        whole.add((text_of(deltas), tuple(tokens_of(deltas))))
    assert len(whole) == 1
