"""What an installation takes with it, and what an import costs."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"torch", "numpy", "transformers", "triton", "pandas", "scipy"}
TOOLS = {"gguf", "safetensors", "httpx", "openai", "pytest", "hypothesis"}


def closure(requirements: list[str]) -> set[str]:
    """Names of all distributions that these requirements bring here, theirs included."""
    seen: set[str] = set()
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        for wanted in ["", *requirement.extras]:
            if f"{key}[{wanted}]" in seen:
                continue
            seen.add(f"{key}[{wanted}]")
            needs = metadata.requires(key) or []
            todo += [(Requirement(text), wanted) for text in needs]
    return {item.partition("[")[0] for item in seen}


def run_python(code: str) -> str:
    """The output of `code` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_make_serve_compiles_make_check_does_not_compile_again(tmp_path: Path) -> None:
    """Tools of an isolated build lie elsewhere each time, and everything depends on where."""
    builds = {}
    for target in (".installed-app", ".installed-dev"):
        command = ["make", "-n", f"VENV={tmp_path}", str(tmp_path / target)]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        tools, build = re.findall(r"pip .* install (.*)", shown)
        assert build.startswith("--no-build-isolation -e '.")
        builds[target] = tools
    assert len(set(builds.values())) == 1


def test_the_default_install_is_small() -> None:
    names = closure(PROJECT["dependencies"])
    assert {"tokenizers", "msgspec", "jinja2", "markupsafe"} <= names
    assert names & HEAVY == set()


def test_the_torch_extra_is_pinned() -> None:
    (requirement,) = PROJECT["optional-dependencies"]["torch"]
    assert str(Requirement(requirement).specifier) == "<2.14,>=2.13"


def test_every_extra_brings_something() -> None:
    assert all(PROJECT["optional-dependencies"].values())


def test_importing_headrace_is_quick() -> None:
    code = """
import json, sys, time
before = set(sys.modules)
started = time.perf_counter()
import headrace
elapsed = time.perf_counter() - started
print(json.dumps([elapsed, sorted(set(sys.modules) - before)]))
"""
    runs = [json.loads(run_python(code)) for _ in range(3)]
    loaded = {module.partition(".")[0] for module in runs[0][1]}
    assert loaded & (HEAVY | {"tokenizers", "starlette", "uvicorn", "rich", "jinja2"}) == set()
    assert min(elapsed for elapsed, _ in runs) < 0.3


def test_nothing_but_the_torch_rooms_needs_more_than_the_default_install() -> None:
    """Import every module with the distributions of the extras made unimportable."""
    code = f"""
import importlib, pkgutil, sys
for blocked in {sorted(HEAVY | TOOLS)!r}:
    sys.modules[blocked] = None
import headrace
rooms = ("headrace.ops.torch", "headrace.ops.triton", "headrace.bench")
names = [m.name for m in pkgutil.walk_packages(headrace.__path__, "headrace.", onerror=print)
         if not m.name.startswith(rooms) and not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
    assert int(run_python(code).split()[-1]) > 40


def test_versions_agree() -> None:
    assert run_python("import headrace; print(headrace.__version__)").strip() == PROJECT["version"]
