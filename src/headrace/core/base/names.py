"""Which texts can be names: what clients send, and what stands in answers, figures and logs; and
what of somebody else's words may stand there.
"""

import re
from typing import Final

_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # the end of a line and a tab included
_SURROGATES: Final = re.compile(r"[\ud800-\udfff]")  # of bytes that were no UTF-8
# What ends lines, drives a terminal or turns text round, and what nobody could write.
_UNSHOWN: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
MAX_CHARS: Final = 500  # of one line of somebody else's words
MAX_LINES: Final = 32


def find_control(text: str) -> str:
    """Why this is not one line of text, as the end of a sentence; empty = it is."""
    found = _CONTROLS.search(text)
    return "" if found is None else f"has the control character {found[0]!r}"


def find_name_fault(name: str) -> str:
    """Why this can be no name, as the end of a sentence; empty = it can."""
    return find_control(name) or ("is not valid UTF-8" if _SURROGATES.search(name) else "")


def one_line(text: str, most: int = MAX_CHARS) -> str:
    """Somebody else's words as they may stand in a log, an answer or a terminal: on one line, with
    escapes in the place of what cannot be shown, and cut to `most`.
    """
    shown = _UNSHOWN.sub(lambda found: repr(found[0])[1:-1], text[: most + 1])
    if len(text) <= most and len(shown) <= most:
        return shown
    note = f"... ({len(text)} characters)"
    return shown[: max(0, most - len(note))] + note


def few_lines(text: str) -> str:
    """The same where lines have a meaning."""
    lines = text.splitlines()
    left = [f"... ({len(lines)} lines)"] if len(lines) > MAX_LINES else []
    return "\n".join([*map(one_line, lines[:MAX_LINES]), *left])
