"""Two machines, as far as their networks go: namespaces, whose addresses exist only inside.

Needs root and `ip`.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

FRONT, BOX = "10.77.0.1", "10.77.0.2"


def can_make_machines() -> bool:
    return shutil.which("ip") is not None and os.geteuid() == 0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Two namespaces and a cable between them; the second one's end is called `box`."""
    front, box = f"hr-front-{os.getpid()}", f"hr-box-{os.getpid()}"
    with ExitStack() as stack:
        for name in (front, box):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "front", "netns", front, "type", "veth", "peer", "box", "netns", box)
        for name, link, address in ((front, "front", FRONT), (box, "box", BOX)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
        yield front, box


def run_in(namespace: str, *words: str, **options: object) -> "subprocess.Popen[str]":
    command = ["ip", "netns", "exec", namespace, sys.executable, *words]
    paths = os.pathsep.join(str(Path(__file__).parents[2] / part) for part in ("src", "tests"))
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command, text=True, env={**os.environ, "PYTHONPATH": paths}, **options
    )
