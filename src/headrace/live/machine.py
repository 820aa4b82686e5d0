"""What this process may use of the machine it runs on, as the configuration's MachineFacts."""

import os
from pathlib import Path

from headrace.core.config.resolve import MachineFacts
from headrace.live.memory import available_bytes

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def machine_facts(*, held_bytes: int = 0) -> MachineFacts:
    """The facts now. `held_bytes` are those that the process already holds of what it will count as
    its own, such as weights.
    """
    return MachineFacts(
        num_cores=num_cores(),
        total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available_bytes=available_bytes() + held_bytes,
        isas=usable_isas(),
    )


def num_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Cores that this process may run on: its affinity, and its container's quota rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota(cpu_max)
    return max(1, min(count or 1, count or 1 if quota is None else -int(-quota // 1)))


def cpu_quota(cpu_max: Path = _CPU_MAX) -> float | None:
    """Cores' worth of time that the container grants; None = no limit. The file is "quota period"
    in microseconds, or "max period".
    """
    try:
        quota, period = cpu_max.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def usable_isas() -> tuple[str, ...]:
    """Instruction sets of the native backend, fastest first; none where it is not built."""
    try:
        from headrace.ops.native import _native
    except ImportError:
        return ()
    fastest = _native.fastest_isa()
    return (fastest, *(isa for isa in reversed(_native.usable_isas()) if isa != fastest))
