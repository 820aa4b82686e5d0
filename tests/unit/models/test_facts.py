"""Typed reading of what files say."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError
from headrace.models.facts import Facts

FACTS = Facts(
    Path("f"),
    {
        "int": 5,
        "float": 0.5,
        "nan": float("nan"),
        "text": "t",
        "flag": True,
        "null": None,
        "table": {"x": 1},
        "texts": ["a", "b"],
        "numbers": array("f", [1.0]),
        "ids": [3, 4],
        "long": "x" * 1000,
    },
)


def test_reads_values_of_their_types() -> None:
    assert FACTS.integer("int") == 5
    assert FACTS.number("int") == 5.0
    assert FACTS.number("float") == 0.5
    assert FACTS.text("text") == "t"
    assert FACTS.flag("flag") is True
    assert list(FACTS.texts("texts")) == ["a", "b"]
    assert list(FACTS.numbers("numbers")) == [1.0]
    assert FACTS.token_ids("ids") == (3, 4)
    assert FACTS.token_ids("int") == (5,)
    table = FACTS.table("table")
    assert table is not None
    assert table.integer("x") == 1


def test_absent_and_null_have_the_default() -> None:
    for key in ("absent", "null"):
        assert key not in FACTS
        assert FACTS.integer(key, 9) == 9
        assert FACTS.texts(key) == ()
        assert FACTS.token_ids(key) == ()
        assert FACTS.table(key) is None
        with pytest.raises(ConfigError, match=f"f: {key} is missing"):
            FACTS.integer(key)


@pytest.mark.parametrize(
    ("method", "key", "limits"),
    [
        ("integer", "flag", {}),
        ("integer", "float", {}),
        ("integer", "int", {"high": 4}),
        ("integer", "int", {"low": 6}),
        ("number", "text", {}),
        ("number", "flag", {}),
        ("number", "nan", {}),
        ("number", "float", {"low": 1.0}),
        ("text", "int", {}),
        ("flag", "int", {}),
        ("table", "text", {}),
        ("texts", "text", {}),
        ("texts", "ids", {}),
        ("numbers", "text", {}),
        ("numbers", "texts", {}),
        ("token_ids", "text", {}),
        ("token_ids", "texts", {}),
    ],
)
def test_refuses_other_types_and_values(method: str, key: str, limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^f: {key} is "):
        getattr(FACTS, method)(key, **limits)


def test_a_fault_shows_no_more_than_a_line() -> None:
    with pytest.raises(ConfigError) as raised:
        FACTS.integer("long")
    assert len(str(raised.value)) < 120
