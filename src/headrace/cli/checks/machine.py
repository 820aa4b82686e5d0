"""The machine: its CPU, cores, memory and company."""

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from headrace.cli.checks import Check, Status
from headrace.core.config.schema import Config
from headrace.core.config.units import counted, format_bytes
from headrace.live.machine import cpu_quota, machine_facts

FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd")
"""CPU features, as Linux names them, that kernels here use or could use."""

BUSY_SHARE = 0.5
"""Of the cores, in others' use, from which on figures say more about the others than about us."""

LEAST_MEMORY_BYTES = 1 << 30

_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")


def check_cpu(config: Config, cpuinfo: Path = Path("/proc/cpuinfo")) -> Iterator[Check]:
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    found = [feature for feature in FEATURES if feature in present]
    model = name[1].strip() if name else platform.machine()
    detail = f"{model}: {', '.join(found) if found else 'no features that are known here'}"
    yield Check("cpu", Status.OK, detail, data={"model": model, "features": found})


def check_cores(config: Config) -> Iterator[Check]:
    """Cores by affinity and by the container's quota, and the threads that are to run on them."""
    machine, quota = machine_facts(), cpu_quota()
    threads = config.device.threads or machine.num_cores
    detail = f"{machine.num_cores} of {os.cpu_count()} may be used, {counted(threads, 'thread')}"
    data = {
        "num_cores": machine.num_cores,
        "num_machine_cores": os.cpu_count(),
        "quota_cores": quota,
        "num_threads": threads,
    }
    if threads > machine.num_cores:
        hint = f"threads wait for one another; --threads {machine.num_cores} is faster"
        yield Check("cores", Status.WARN, detail, hint, data)
    else:
        yield Check("cores", Status.OK, detail, data=data)


def check_load(config: Config) -> Iterator[Check]:
    load, num_cores = os.getloadavg()[0], machine_facts().num_cores
    detail = f"{load:.2f} on average over the last minute, on {num_cores} cores"
    data = {"load_average_1min": round(load, 2)}
    if load > BUSY_SHARE * num_cores:
        hint = "others use these cores: answers will be slower and times will vary"
        yield Check("load", Status.WARN, detail, hint, data)
    else:
        yield Check("load", Status.OK, detail, data=data)


def check_memory(config: Config, memory_max: Path = _MEMORY_MAX) -> Iterator[Check]:
    machine = machine_facts()
    limit = memory_max.read_text().strip() if memory_max.is_file() else "max"
    limit_bytes = int(limit) if limit.isdigit() else None
    total, available = machine.total_bytes, machine.available_bytes
    detail = f"{format_bytes(available)} of {format_bytes(total)} available"
    if limit_bytes is not None:
        detail += f", this container may have {format_bytes(limit_bytes)}"
    data = {
        "available_bytes": available,
        "total_bytes": total,
        "container_limit_bytes": limit_bytes,
    }
    if available < LEAST_MEMORY_BYTES:
        yield Check(
            "memory", Status.WARN, detail, "close something; even small models need 1 GiB", data
        )
    else:
        yield Check("memory", Status.OK, detail, data=data)
