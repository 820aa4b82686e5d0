"""Which texts can be names: what clients send, and what stands in answers, figures and logs."""

import re
from typing import Final

_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # the end of a line and a tab included
_SURROGATES: Final = re.compile(r"[\ud800-\udfff]")  # of bytes that were no UTF-8


def find_control(text: str) -> str:
    """Why this is not one line of text, as the end of a sentence; empty = it is."""
    found = _CONTROLS.search(text)
    return "" if found is None else f"has the control character {found[0]!r}"


def find_name_fault(name: str) -> str:
    """Why this can be no name, as the end of a sentence; empty = it can."""
    return find_control(name) or ("is not valid UTF-8" if _SURROGATES.search(name) else "")
