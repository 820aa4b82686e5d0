"""Whole numbers on a command line: what is none is refused, where the library would round it."""

from collections.abc import Sequence
from typing import Any, get_args

from cyclopts import CoercionError, Token, convert


def convert_strictly(hint: Any, tokens: Sequence[Token]) -> Any:
    """As the library converts, but for fractions in the place of whole numbers."""
    if _is_whole(hint):
        for token in tokens:
            if _is_fraction(token.value):
                raise CoercionError(
                    msg=f'"{token.value}" is not a whole number', token=token, target_type=int
                )
    return convert(hint, tokens)


def _is_whole(hint: Any) -> bool:
    """Whether whole numbers are all that it takes, beside nothing."""
    leaves = _leaves(hint)
    return int in leaves and not leaves & {float, str}


def _leaves(hint: Any) -> set[Any]:
    parts = get_args(hint)
    return set().union(*map(_leaves, parts)) if parts else {hint}


def _is_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except ValueError:
        return False  # what it is, the library says
