"""A real Ray over two machines, as far as their networks go: namespaces of the test's own. Ray
binds all addresses, whatever it is told, so it begins nowhere else.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.namespaces import BOX, FRONT, two_machines

PORT = 6379
HEAD = f"{FRONT}:{PORT}"
START_S = 150
# A node that says nothing for 6 s is lost; a slow machine needs as much.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
}
ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "tests"))
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": paths, **more}


def start_ray(namespace: str, *words: str, env: Mapping[str, str] | None = None) -> None:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "ray.scripts.scripts"]
    options = ["--num-cpus", "2", "--object-store-memory", "80000000", "--disable-usage-stats"]
    done = subprocess.run(
        [*command, "start", *options, *words],
        env=environment(RAY_agent_register_timeout_ms="100000", **(env or {})),
        timeout=START_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def start_both(front: str, box: str, folder: str, env: Mapping[str, str] | None = None) -> None:
    """A head in the first one and a node in the second. `folder` is that of Ray's sockets."""
    head = ["--head", "--node-ip-address", FRONT, "--port", str(PORT), "--temp-dir", folder]
    config = ["--include-dashboard=false", "--system-config", json.dumps(HEALTH)]
    start_ray(front, *head, *config, env=env)
    start_ray(box, "--address", HEAD, "--node-ip-address", BOX, env=env)


@contextmanager
def ray_machines(env: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """With a head in the first one and a node in the second, of two CPUs each."""
    with two_machines() as (front, box), ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        for name in (front, box):
            stack.callback(end_all, name)
        start_both(front, box, folder, env)
        yield front, box


def short_folder() -> "tempfile.TemporaryDirectory[str]":
    """Ray's sockets lie in it, whose paths may have 107 letters."""
    return tempfile.TemporaryDirectory(prefix="hr", dir="/tmp", ignore_cleanup_errors=True)


def commands_in(namespace: str) -> dict[int, str]:
    """By the process, which only this test's namespace has."""
    done = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True
    )
    commands = {}
    for pid in map(int, done.stdout.split()):
        try:
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
    return commands


def workers_in(namespace: str) -> int:
    commands = commands_in(namespace).values()
    return sum("headrace.cluster.placement.worker" in command for command in commands)


def end_all(namespace: str, having: str = "") -> None:
    """All processes of this namespace, or those with these letters in their command lines."""
    for pid, command in commands_in(namespace).items():
        if having in command:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
