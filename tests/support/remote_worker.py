"""A worker that goes to front ends by itself, in a process of its own."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from headrace.core.config.cluster import ClusterConfig
from support.leftovers import WATCH

MOST_PEERS = 4  # that one meets in a test
SECRET = "sixteen letters!"
# `serve_fronts` is what `headrace worker` runs; what stands before it may spoil something.
_SCRIPT = """
import sys
from headrace.cluster.remote import Leaving, serve_fronts
from headrace.core.base.worker import Role
secret, role, name, drain_timeout_s, *ports = sys.argv[1:]
fronts = [("127.0.0.1", int(port)) for port in ports]
leaving = Leaving(float(drain_timeout_s))
leaving.take_signals()
serve_fronts(fronts, secret.encode(), role=Role(role), name=name, leaving=leaving)
"""


def listening(folder: Path, port: int, **settings: Any) -> ClusterConfig:
    """Of a front end that has no worker of its own, and waits for such ones at this port."""
    secret = folder / "secret"
    secret.write_text(SECRET)
    return ClusterConfig(workers=0, listen=f"127.0.0.1:{port}", secret_file=str(secret), **settings)


@contextmanager
def remote_worker(
    *ports: int,
    role: str = "mixed",
    name: str = "box",
    secret: str = SECRET,
    before: str = "",
    drain_timeout_s: float = 30,
) -> Iterator["subprocess.Popen[str]"]:
    """For the front ends at these ports; `before` is run in its process first."""
    script = [sys.executable, "-c", before + _SCRIPT]
    words = [*script, secret, role, name, str(drain_timeout_s), *map(str, ports)]
    with subprocess.Popen(words, text=True, stderr=subprocess.PIPE) as process:
        try:
            yield process
            WATCH.look_at_worker(name, process.pid, MOST_PEERS, num_links=len(ports))
        finally:
            process.kill()


def free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(num)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
