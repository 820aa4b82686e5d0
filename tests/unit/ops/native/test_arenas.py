"""Small objects of Python in large pages: asked for once, and nothing that lives is lost."""

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, since there is no way back.
SCRIPT = """
from pathlib import Path
from headrace.ops.native import _native

def advised():
    text = Path("/proc/self/smaps").read_text()
    sizes = [int(part.split("\\nSize:")[1].split()[0]) for part in text.split("VmFlags:")[:-1]]
    flags = [line for line in text.splitlines() if line.startswith("VmFlags:")]
    return sum(kib for kib, line in zip(sizes, flags, strict=True) if " hg" in line)

old = [(i, str(i)) for i in range(100_000)]  # some lie in arenas of before
before = advised()
assert _native.large_arenas()
assert not _native.large_arenas()
new = [(i, str(i)) for i in range(1_000_000)]
first = advised() - before
assert first >= 64 << 10, first  # KiB: a stretch or more
assert all(int(text) == number for number, text in [*old, *new])
del old, new
again = [(i, str(i)) for i in range(1_000_000)]
assert advised() - before == first, "what was given back is not used again"
assert all(int(text) == number for number, text in again)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux shows its pages")
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no large pages"
)
def test_small_objects_come_to_lie_in_large_pages() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
