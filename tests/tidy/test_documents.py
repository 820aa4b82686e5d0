"""Documents name files, targets and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|cpp|h|hpp))`")
TARGET = re.compile(r"(?:`|^)make ([a-z][\w-]*)", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(document: Path) -> set[str]:
    headings = HEADING.findall(document.read_text())
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def exists(document: Path, named: str) -> bool:
    """A file may be named from the document, the root, the package, the tests, or alone."""
    places = [document.parent, ROOT, ROOT / "src" / "headrace", ROOT / "tests"]
    is_alone = "/" not in named and any((ROOT / "src").rglob(named))
    return is_alone or any((place / named).exists() for place in places)


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (document.parent / file) if file else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_named_files_exist(document: Path) -> None:
    named = FILE.findall(document.read_text())
    assert [n for n in named if not exists(document, n)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_named_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(TARGET.findall(document.read_text())) - targets == set()


def test_decision_records_are_numbered_in_order() -> None:
    numbers = sorted(int(path.name[:4]) for path in ROOT.glob("docs/adr/[0-9]*.md"))
    assert numbers == list(range(len(numbers)))


def test_every_document_can_be_found_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    assert [ids(d) for d in DOCUMENTS if d != index and d.resolve() not in linked] == []
