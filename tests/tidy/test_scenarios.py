"""The table of scenarios names tests that exist, and leaves none out."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "chaos" / "README.md").read_text()
NAMED = re.findall(r"(\*?)`([\w/]+\.py)::(\w+)`", TABLE)


def test_every_scenario_has_a_test() -> None:
    rows = re.findall(r"^\| ([FL]\d\d) \|.*$", TABLE, re.MULTILINE)
    assert rows == [*(f"F{n:02}" for n in range(1, 19)), *(f"L{n:02}" for n in range(1, 8))]
    lines = [line for line in TABLE.splitlines() if re.match(r"\| [FL]\d\d", line)]
    assert [line for line in lines if "::" not in line] == []


def test_every_test_that_is_named_exists_and_is_slow_where_it_says_so() -> None:
    assert len(NAMED) > 50
    wrong = []
    for star, path, name in NAMED:
        file = TESTS / path
        source = file.read_text() if file.exists() else ""
        found = re.search(rf"((?:^@.*\n(?:^[^@\n].*\n)*)*)^(?:def )?{name}\b", source, re.MULTILINE)
        is_slow = "pytest.mark.slow" in source.split("\n\n\n")[0] or (
            found is not None and "@pytest.mark.slow" in found[1]
        )
        if found is None or is_slow != bool(star):
            wrong.append(f"{path}::{name}")
    assert wrong == []
