"""How much memory this process may still take."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be taken without swapping: what the machine, or its container's limit, has
    left.
    """
    machine = _machine_bytes()
    limit = _number(_CGROUP / "memory.max")
    used = _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return machine
    # File pages that nobody used lately count as used there, but give way.
    reclaimable = int(_fields(_CGROUP / "memory.stat", " ").get("inactive_file", "0"))
    return min(machine, max(0, limit - used + reclaimable))


def _machine_bytes() -> int:
    free = _fields(Path("/proc/meminfo"), ":").get("MemAvailable")
    if free is not None:
        return int(free.split()[0]) * 1024
    # Where nobody says what is free, half of the machine leaves room for others.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _fields(path: Path, separator: str) -> dict[str, str]:
    """Lines `name<separator>value` of a file of the kernel; nothing where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(separator) for line in lines)
    return {name: value.strip() for name, _, value in pairs}


def _number(path: Path) -> int | None:
    """The number in a control file; None where there is none (no such file, or "max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
