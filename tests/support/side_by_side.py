"""`make bench-engines`: headrace beside other people's engines, in one run on this machine."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from support.engine_process import EngineProcess
from support.peers.environments import LeftOutError, install
from support.peers.servers import PEERS, Peer

OWN_EXTRA = '{"ignore_eos": true}'
OUT = "build/side-by-side.json"


def started(name: str, log: Path, stack: ExitStack) -> tuple[Peer, EngineProcess]:
    """Raises LeftOutError where this machine does not get to run it."""
    install(name)
    peer = PEERS[name]
    engine = peer.start(log)
    stack.callback(engine.stop)
    print(f"starting {name}, see {log}", file=sys.stderr)
    try:
        engine.await_ready(peer.start_timeout_s)
    except (RuntimeError, TimeoutError) as error:
        raise LeftOutError(f"{error}, see {log}") from error
    return peer, engine


def main(names: str, arguments: Sequence[str]) -> int:
    """Each engine computes with as many threads as there are cores, one after the other."""
    logs = Path(tempfile.mkdtemp(prefix="headrace-side-by-side-"))
    command = [sys.executable, "-m", "headrace.cli.main", "bench", "all", "--out", OUT]
    command += ["--extra", OWN_EXTRA]
    with ExitStack() as stack:
        for name in dict.fromkeys(names.split()):
            try:
                peer, engine = started(name, logs / f"{name}.log", stack)
            except LeftOutError as error:
                print(f"left out: {name}: {error}", file=sys.stderr)
                continue
            command += ["--against", engine.url, "--extra", peer.extra]
        return subprocess.run([*command, *arguments]).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
