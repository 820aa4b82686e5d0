"""Objects of Python in large pages: asked for once, and nothing that lives is lost."""

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


LISTS = """
import platform
from pathlib import Path
from headrace.ops.native import _native

def resident_kib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])

def address_of(items):  # of a list's memory: behind the object's head, reference count, type, size
    import ctypes
    return ctypes.c_void_p.from_address(id(items) + 24).value

before = resident_kib()
is_glibc = platform.libc_ver()[0] == "glibc"
assert _native.large_heap() == is_glibc
assert not _native.large_heap()
assert resident_kib() - before < 64 << 10, "what nobody touches takes memory"
if is_glibc:
    kept = [list(range(3000)) for _ in range(10_000)]  # 240 MB
    flags = {}
    for entry in Path("/proc/self/smaps").read_text().splitlines():
        words = entry.split()
        if words and "-" in words[0] and not words[0].endswith(":"):
            span = tuple(int(part, 16) for part in words[0].split("-"))
        elif words and words[0] == "VmFlags:":
            flags[span] = words
    places = [address_of(items) for items in kept[100:]]
    huge = [span for span, words in flags.items() if "hg" in words]
    inside = sum(any(begin <= place < end for begin, end in huge) for place in places)
    assert inside > 0.9 * len(places), (inside, len(places))
    assert all(items[-1] == 2999 for items in kept)
"""


@pytest.mark.parametrize(
    "script", [pytest.param(SCRIPT, id="small"), pytest.param(LISTS, id="lists")]
)
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux shows its pages")
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no large pages"
)
def test_objects_come_to_lie_in_large_pages(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
