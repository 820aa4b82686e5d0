"""The size and the time of a fresh installation without extras."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec


class Install(msgspec.Struct, frozen=True, kw_only=True):
    venv_bytes: int  # the whole virtual environment
    headrace_bytes: int  # of these, the package itself
    num_distributions: int
    create_s: float
    install_s: float


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`, links not followed."""
    return sum(f.lstat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())


def install(project: Path) -> Install:
    """`pip install PROJECT` into a new virtual environment, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv"
        started_s = time.perf_counter()
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        created_s = time.perf_counter()
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "install", str(project)], check=True)
        installed_s = time.perf_counter()
        packages = next(venv.glob("lib/python*/site-packages"))
        return Install(
            venv_bytes=size_of(venv),
            headrace_bytes=size_of(packages / "headrace"),
            num_distributions=len(list(packages.glob("*.dist-info"))),
            create_s=created_s - started_s,
            install_s=installed_s - created_s,
        )
