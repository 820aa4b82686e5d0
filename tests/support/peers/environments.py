"""Environments of other people's engines in build/engines, each installed by a pinned list.

    python -m support.peers.environments llama-cpp

Needs about 5 GB for all of them; llama-cpp-python is compiled for this machine, which takes ten
minutes or more.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

LISTS = Path(__file__).parent
FOLDER: Final = Path("build/engines")
ENGINES: Final = ("llama-cpp", "openvino", "vllm")
INSTALL_TIMEOUT_S: Final = 3600.0
SETTINGS = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}


class LeftOutError(Exception):
    """An engine that this machine does not get to run, and why."""


def folder_of(engine: str) -> Path:
    return FOLDER / engine


def python_of(engine: str) -> Path:
    return folder_of(engine) / "bin" / "python"


def version_of(engine: str) -> str:
    """Name and version of the package that the engine's list begins with."""
    name, _, version = _list_of(engine).splitlines()[0].partition("==")
    return f"{name.partition('[')[0]}-{version}"


def run(command: Sequence[str | Path], log: Path, timeout_s: float) -> None:
    """Raises LeftOutError unless it ends well; what it says goes to the log."""
    with log.open("ab") as output:
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **SETTINGS},
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise LeftOutError(f"{command[0]}: took more than {timeout_s:g} s, see {log}") from None
        except OSError as error:
            raise LeftOutError(f"{command[0]}: {error}") from None
    if ended.returncode != 0:
        raise LeftOutError(f"{command[0]}: ended with {ended.returncode}, see {log}")


def install(engine: str) -> None:
    """Does nothing where it has been, by the same list. Raises LeftOutError."""
    if engine not in ENGINES:
        raise LeftOutError(f"there is no such engine; there are {', '.join(ENGINES)}")
    folder, wanted = folder_of(engine), _list_of(engine)
    installed = folder / ".installed"
    if installed.exists() and installed.read_text() == wanted:
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = FOLDER / f"{engine}.log"
    print(f"installing {version_of(engine)} into {folder}, see {log}", file=sys.stderr)
    run([sys.executable, "-m", "venv", "--clear", folder], log, 300.0)
    pip: list[str | Path] = [python_of(engine), "-m", "pip", "--disable-pip-version-check"]
    # The lists are whole, and leave out what an engine names and does not need here.
    run([*pip, "install", "--no-deps", "-r", LISTS / f"{engine}.txt"], log, INSTALL_TIMEOUT_S)
    installed.write_text(wanted)


def _list_of(engine: str) -> str:
    return (LISTS / f"{engine}.txt").read_text()


def main(engines: Sequence[str]) -> int:
    for engine in engines:
        try:
            install(engine)
        except LeftOutError as error:
            print(f"{engine} was not installed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
