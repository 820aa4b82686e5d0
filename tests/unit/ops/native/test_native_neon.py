"""NEON kernels on a CPU without NEON: cross-compiled, and run by an emulator, bit against bit."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
CSRC = ROOT / "src" / "headrace" / "ops" / "native" / "csrc"
CROSS = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
NEON = ["-march=armv8.2-a+dotprod"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
PARTS = ["isa", "memory", "pool", "record", "run", "run_linear", "weight", "kernels_portable"]

needs_compiler = pytest.mark.skipif(
    shutil.which(CROSS) is None, reason=f"{CROSS} is not installed (g++-aarch64-linux-gnu)"
)


@needs_compiler
@pytest.mark.timeout(300)
def test_neon_compiles() -> None:
    source = CSRC / "kernels_neon.cpp"
    command = [CROSS, *FLAGS, *NEON, "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_compiler
@pytest.mark.skipif(
    shutil.which(EMULATOR) is None, reason=f"{EMULATOR} is not installed (qemu-user)"
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for this machine")
def test_neon_gives_the_bits_of_every_other_instruction_set(tmp_path: Path) -> None:
    """A forward pass over every weight type, with all types of activations and of KV."""
    here = run(tmp_path / "here", "g++", "avx2", AVX2, [])
    there = run(tmp_path / "there", CROSS, "neon", NEON, [EMULATOR])
    precisions = [
        f"{a}+{kv}" for a in ("f32", "bf16", "int12", "int8") for kv in ("bf16", "int8", "fp8")
    ]
    assert {f"{isa} {one}" for isa in ("portable", "neon") for one in precisions} == there.keys()
    assert {f"portable {one}" for one in precisions} <= here.keys()
    for precision in precisions:
        found = {
            bits
            for results in (here, there)
            for name, bits in results.items()
            if name.endswith(f" {precision}")
        }
        assert len(found) == 1, (here, there)


def run(
    build: Path, compiler: str, isa: str, flags: list[str], prefix: list[str]
) -> dict[str, str]:
    """{"instruction set precision": hash} of what the program prints."""
    build.mkdir()
    common = [compiler, *FLAGS, f"-I{CSRC}", f"-DHEADRACE_HAVE_{isa.upper()}"]
    check = Path(__file__).parent / "csrc" / "kernel_bits.cpp"
    sources = [*(CSRC / f"{part}.cpp" for part in PARTS), check]
    kernels = [*common, *flags, "-c", str(CSRC / f"kernels_{isa}.cpp"), "-o", "kernels.o"]
    program = [*common, "-static", "-pthread", *map(str, sources), "kernels.o", "-o", "kernel_bits"]
    for command in (kernels, program):
        subprocess.run(command, cwd=build, check=True)
    done = subprocess.run([*prefix, "./kernel_bits"], cwd=build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
