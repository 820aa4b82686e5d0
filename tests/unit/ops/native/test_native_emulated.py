"""The AVX-512 and AMX kernels on a CPU without them: compiled against SIMD Everywhere, plain
code in place of tiles; same tests."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.ops.native import _native

ROOT = Path(__file__).parents[4]
SUITES = [
    "tests/unit/ops/native/test_native_kernels.py",
    "tests/unit/ops/native/test_native_attention.py",
    "tests/unit/ops/native/test_native_rounding.py",
    "tests/unit/ops/native/test_native_bf16.py",
    "tests/conformance/test_invariance.py",
]
SIMDE = Path("/usr/include/simde/x86/avx512.h")

# Puts the emulating extension where the backend looks for its own.
PLUGIN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("headrace.ops.native._native", {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
import headrace.ops.native
headrace.ops.native._native = module
assert {{"avx512", "amx"}} <= set(module.usable_isas())
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not SIMDE.exists(), reason="SIMD Everywhere is not installed (libsimde-dev)")
@pytest.mark.skipif("avx2" not in _native.usable_isas(), reason="emulation needs AVX2")
@pytest.mark.skipif(importlib.util.find_spec("nanobind") is None, reason="needs nanobind to build")
def test_emulated_avx512(tmp_path: Path) -> None:
    build = tmp_path / "build"
    define = [
        "-DHEADRACE_EMULATE_AVX512=ON",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    subprocess.run(["cmake", "-S", ROOT, "-B", build, *define], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "-j2"], check=True, capture_output=True)
    (extension,) = build.glob("_native*.so")
    (tmp_path / "emulated_native.py").write_text(PLUGIN.format(path=str(extension)))
    path = os.pathsep.join([str(ROOT / "src"), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "emulated_native", *SUITES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
