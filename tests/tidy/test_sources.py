"""Rules of STYLE.md that are about text and size, held as tests."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 50  # without the docstring
MAX_BLOB_BYTES = 1 << 20

# Path from the root -> why it may be longer.
LONG_MODULES: dict[str, str] = {}
# "path:function" -> why it may be longer.
LONG_FUNCTIONS: dict[str, str] = {}

SKIPPED_FOLDERS = {"build", "dist", "models", "__pycache__"}
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".cpp",
    ".h",
    ".hpp",
    ".inl",
    ".txt",
    ".cmake",
    ".yml",
    ".yaml",
    "",
}

# Spelled in pieces so that this file passes its own test.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
ELSEWHERE = re.compile(
    r"(?<![\w.:/])/(?:home|root|work|opt|mnt|Users)/"  # a path of one machine
    + r"|py" + r"pi\.(?:org|io)|python" + r"hosted"  # a registry's host
)  # fmt: skip
CODE_LOADERS = {"pickle", "cPickle", "dill", "shelve", "marshal", "joblib", "cloudpickle"}


def files(top: Path = ROOT) -> Iterator[Path]:
    """Every file of the project; folders that are built or hidden are not part of it."""
    for path in sorted(top.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name != ".ci"
            if not hidden and path.name not in SKIPPED_FOLDERS:
                yield from files(path)
        # In a worktree, .git is a file that names a folder of this machine.
        elif not path.is_symlink() and path.name != ".git":
            yield path


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(top: Path) -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in files(top) if path.suffix == ".py"]


def room(path: Path) -> str:
    """`cli` for src/headrace/cli/main.py."""
    return path.relative_to(SRC / "headrace").parts[0]


SOURCES = parsed(SRC)
TEXTS = [path for path in files() if path.suffix in TEXT_SUFFIXES and path.name != "LICENSE"]


def test_the_walk_finds_the_project() -> None:
    names = {name(path) for path in files()}
    assert {"pyproject.toml", ".ci/run", "src/headrace/__init__.py", name(Path(__file__))} <= names
    assert len(SOURCES) > 40


def test_modules_are_short() -> None:
    lengths = {
        name(path): path.read_text().count("\n")
        for path in files()
        if path.suffix in {".py", ".cpp", ".h", ".hpp", ".inl"}
    }
    long = {n: length for n, length in lengths.items() if length > MAX_MODULE_LINES}
    assert long.keys() - LONG_MODULES.keys() == set(), long
    assert LONG_MODULES.keys() - long.keys() == set(), "an exception that is no longer needed"


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_functions_are_short() -> None:
    long = {
        f"{name(path)}:{node.name}": function_lines(node)
        for path, tree in SOURCES
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and function_lines(node) > MAX_FUNCTION_LINES
    }
    assert long.keys() - LONG_FUNCTIONS.keys() == set(), long
    assert LONG_FUNCTIONS.keys() - long.keys() == set(), "an exception that is no longer needed"


@pytest.mark.parametrize("pattern", [UNFINISHED, ELSEWHERE], ids=["unfinished", "elsewhere"])
def test_no_text_says_what_does_not_belong(pattern: re.Pattern[str]) -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_patterns_find_what_they_look_for() -> None:
    assert UNFINISHED.search("# TO" + "DO: later")
    assert ELSEWHERE.search("see /ro" + "ot/notes")
    assert ELSEWHERE.search("https://py" + "pi.org/simple")
    assert not ELSEWHERE.search("http://127.0.0.1:8000/v1/models")


def forbidden_calls(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        where = f"{name(path)}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" as call)):
                yield f"{where}: {call} runs text as code"
            case ast.Call(func=ast.Name(id="print")) if room(path) not in {"cli", "bench"}:
                yield f"{where}: print outside the command line"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                yield f"{where}: torch.load reads pickles"
            case ast.keyword(arg="trust_remote_code"):
                yield f"{where}: code from a model folder"
            case ast.Import(names=names) if CODE_LOADERS & {n.name for n in names}:
                yield f"{where}: a format that runs code"
            case ast.ImportFrom(module=module) if module in CODE_LOADERS:
                yield f"{where}: a format that runs code"
            case ast.ExceptHandler(type=None | ast.Name(id="Exception" | "BaseException")) if all(
                isinstance(statement, ast.Pass) for statement in node.body
            ):
                yield f"{where}: an error is swallowed"


def test_sources_call_nothing_forbidden() -> None:
    assert [line for path, tree in SOURCES for line in forbidden_calls(path, tree)] == []


def test_forbidden_calls_are_seen() -> None:
    text = "import pickle\nprint(eval('1'))\ntorch.load('x')\nf(trust_remote_code=True)\n"
    text += "try:\n    f()\nexcept Exception:\n    pass\n"
    lines = list(forbidden_calls(SRC / "headrace" / "core" / "x.py", ast.parse(text)))
    assert len(lines) == 6
    assert not list(forbidden_calls(SRC / "headrace" / "cli" / "x.py", ast.parse("print(1)")))


def test_every_package_says_what_it_decides() -> None:
    silent = [
        name(p) for p, tree in SOURCES if p.name == "__init__.py" and not ast.get_docstring(tree)
    ]
    assert silent == []
    folders = {path.parent for path, _ in SOURCES}
    assert [name(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_no_large_files() -> None:
    large = {
        name(path): path.stat().st_size for path in files() if path.stat().st_size > MAX_BLOB_BYTES
    }
    assert {n: size for n, size in large.items() if not n.endswith(".so")} == {}
