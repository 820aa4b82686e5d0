"""The wheel has what it needs and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_holds_the_package_and_its_native_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel"]
    subprocess.run([*command, "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("headrace-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.partition("/")[0] for name in names}
    assert {root.partition("-")[0] for root in roots} == {"headrace"}
    assert {"headrace/__init__.py", "headrace/py.typed", "headrace/cli/main.py"} <= set(names)
    natives = {name.partition(".")[0] for name in names if name.endswith(".so")}
    assert {"headrace/ops/native/_native", "headrace/core/scheduler/scheduler"} <= natives
    # Each is beside the Python that it is made from, but for what they share.
    alone = {"headrace/ops/native/_native", "headrace/compiled__mypyc"}
    assert {f"{name}.py" for name in natives - alone} <= set(names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".hpp", ".inl", ".pyc"))]
    sources = {p.relative_to(ROOT / "src").as_posix() for p in ROOT.glob("src/headrace/**/*.py")}
    assert sources <= set(names)
    assert wheel.stat().st_size < 4 << 20


def test_mypyc_understands_the_machines(tmp_path: Path) -> None:
    """Or a wheel has them interpreted, and only a warning of its build would tell."""
    script = [sys.executable, str(ROOT / "cmake" / "compiled_core.py")]
    subprocess.run([*script, str(ROOT / "src"), str(tmp_path)], check=True)
    sources = (tmp_path / "sources.cmake").read_text()
    # A Struct in one of these would leave it as it is.
    for machine in ("engine.core", "kv.manager", "router.core", "router.front", "engine.glide"):
        assert f"headrace_add_extension(headrace.core.{machine} " in sources
