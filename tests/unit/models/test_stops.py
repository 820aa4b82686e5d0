"""Stop strings: cases one can read, and agreement with a search over the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.base.errors import RequestError
from headrace.models.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


def test_a_stop_across_pushes_is_cut_out() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Hi\nUs") == "Hi"
    assert matcher.push("er") == ""
    assert matcher.push(": x") == ""
    assert matcher.matched == "\nUser:"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_what_turns_out_to_be_no_stop_is_released() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab") == "x"
    assert matcher.push("d") == "abd"
    assert matcher.push("ab") == ""
    assert matcher.flush() == "ab"
    assert matcher.matched is None


def test_only_as_much_is_held_back_as_may_begin_a_stop() -> None:
    matcher = StopMatcher(["aab", "b!"])
    assert matcher.push("aaa") == "a"
    assert matcher.push("c") == "aac"
    assert matcher.push("b") == ""
    assert matcher.push("b") == "b"


def test_include_keeps_the_stop() -> None:
    assert run(["STOP"], ["go ST", "OP on"], include=True) == ("go STOP", "STOP")
    assert run(["STOP"], ["go ST", "OP on"]) == ("go ", "STOP")


def test_the_first_to_be_complete_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["bc", "abc"], ["xabcd"]) == ("x", "abc")
    assert run(["same", "same"], ["same"]) == ("", "same")


def test_no_stops_hold_nothing() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError) as raised:
        StopMatcher(["a", ""])
    assert raised.value.param == "stop"


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """The same by definition: try every end, then the longest stop that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


TEXT = st.text("aab!", max_size=30)
STOPS = st.lists(st.text("aab!", min_size=1, max_size=5), max_size=4)


@given(STOPS, st.lists(TEXT, max_size=8))
def test_agrees_with_a_search_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == naive(stops, "".join(pieces))


@given(STOPS, st.lists(TEXT, max_size=8))
def test_holds_back_exactly_the_longest_possible_beginning(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += matcher.push(piece)
        if matcher.matched is not None:
            return
        beginnings = [
            length
            for stop in stops
            for length in range(len(stop))
            if seen.endswith(stop[:length]) and length <= len(seen)
        ]
        assert sent == seen[: len(seen) - max(beginnings, default=0)]


def test_long_stops_cost_linear_time() -> None:
    stop = "a" * 20_000 + "b"
    matcher = StopMatcher([stop])
    text = "".join(matcher.push("a" * 1000) for _ in range(100))
    assert len(text) == 80_000
    assert matcher.push("b") == ""
    assert matcher.matched == stop
