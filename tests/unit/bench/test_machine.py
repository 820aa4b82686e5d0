"""Memory of a process is counted with its descendants'."""

import os
import subprocess
import sys

from headrace.bench.machine import machine, peak_memory_bytes

# A grandchild that has touched 48 MiB, under a child that only waits for it.
CHILD = """
import subprocess, sys
code = "import sys; x = bytearray(48 << 20); sys.stdout.write('y'); sys.stdout.flush(); input()"
subprocess.run([sys.executable, "-S", "-c", code], check=True)
"""


def test_peak_memory_counts_descendants() -> None:
    command = [sys.executable, "-S", "-c", CHILD]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        peak = peak_memory_bytes(child.pid)
        child.communicate(b"\n")
    assert peak > 48 << 20
    assert child.returncode == 0


def test_a_process_that_is_gone_has_no_memory() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    assert peak_memory_bytes(child.pid) == 0


def test_machine_states_its_facts() -> None:
    facts = machine()
    assert facts.num_cores == len(os.sched_getaffinity(0))
    assert facts.memory_bytes > 1 << 28
    assert facts.cpu
    assert set(facts.versions) == {"headrace", "tokenizers", "uvicorn"}
