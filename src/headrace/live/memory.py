"""How much memory this process may still take."""

import os
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be taken without swapping: what the machine has left, or the container's limit
    leaves.
    """
    left = [_machine_bytes()]
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _number(_CGROUP / limit_name), _number(_CGROUP / used_name)
        if limit is not None and used is not None:
            left.append(max(0, limit - used))
    return min(left)


def _machine_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        # No way to ask what is free; half of the machine is a guess that leaves room for others.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total // 2 if sys.platform != "linux" else total
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _number(path: Path) -> int | None:
    """The number in a control file; None where there is none (no such file, or "max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
