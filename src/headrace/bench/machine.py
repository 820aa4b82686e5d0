"""The facts beside every figure: on what, with what, and in whose company it was measured."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import msgspec

from headrace import __version__

ISA_FLAGS = ("asimddp", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: str
    isa: tuple[str, ...]
    num_cores: int  # that this process may use
    memory_bytes: int
    load_average: float  # over the last minute, before the measurement began
    kernel: str
    python: str
    versions: dict[str, str]


def machine() -> Machine:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return Machine(
        cpu=model[1].strip() if model else platform.machine(),
        isa=tuple(flag for flag in ISA_FLAGS if flag in present),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg()[0],
        kernel=platform.release(),
        python=platform.python_version(),
        versions={name: metadata.version(name) for name in ("tokenizers", "uvicorn")}
        | {"headrace": __version__},
    )


def peak_memory_bytes(pid: int) -> int:
    """The most memory that process `pid` and its descendants had resident (VmHWM, summed)."""
    peaks, children = dict[int, int](), dict[int, list[int]]()
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            status = path.read_text()
        except OSError:  # gone since, or somebody else's
            continue
        fields = dict(re.findall(r"^(PPid|VmHWM):\s*(\d+)", status, re.MULTILINE))
        child = int(path.parent.name)
        peaks[child] = 1024 * int(fields.get("VmHWM", 0))
        children.setdefault(int(fields["PPid"]), []).append(child)
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return sum(peaks.get(member, 0) for member in family)
