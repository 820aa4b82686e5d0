"""What of somebody else's words may stand in a log."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.base.names import MAX_CHARS, MAX_LINES, few_lines, one_line


def test_what_drives_a_terminal_is_spelled_and_what_is_long_is_cut() -> None:
    assert one_line("it has no room") == "it has no room"
    assert one_line("a\x1b[2J\r\nb\x9b") == "a\\x1b[2J\\r\\nb\\x9b"
    assert one_line("\u202etxt.exe\u2028\udc80") == "\\u202etxt.exe\\u2028\\udc80"
    assert one_line("é€😀") == "é€😀"
    assert one_line("x" * MAX_CHARS) == "x" * MAX_CHARS
    cut = one_line("x" * 100_000)
    assert cut == "x" * (MAX_CHARS - 23) + "... (100000 characters)"


@given(st.text(st.characters(), max_size=80), st.integers(40, 60))
def test_it_is_one_line_of_bounded_length_that_stays_as_it_is(text: str, most: int) -> None:
    line = one_line(text, most)
    assert len(line) <= most
    assert line.isprintable() or not text.isprintable()
    assert len(line.splitlines()) <= 1
    assert one_line(line, most) == line
    line.encode()


def test_lines_that_mean_something_stay_but_not_a_thousand_of_them() -> None:
    assert few_lines("one\ntw\x1bo") == "one\ntw\\x1bo"
    lines = few_lines("word\n" * 1000).split("\n")
    assert lines == ["word"] * MAX_LINES + ["... (1000 lines)"]
