"""What runs inside of an actor of Ray: one life of a worker, as a process of its own.

Ray's own process beside it does nothing but wait, so that a fault of the worker is no fault of Ray,
and the worker is the same program as anywhere else.
"""

import subprocess
import sys

from headrace.cluster.placement.port import NO_FRONT


class WorkerActor:
    def ping(self) -> None:
        """Returns when the actor is there."""

    def run(self, order: bytes, front: str) -> str:
        """Until the worker ends; how it has, for people. It ends with this actor's process."""
        with subprocess.Popen(
            [sys.executable, "-m", "headrace.cluster.placement.worker"], stdin=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            process.stdin.write(order + b"\n")
            process.stdin.flush()  # and it stays open: its end would be the worker's
            code = process.wait()
        if code == NO_FRONT:
            return f"no way to the front end at {front}"
        return f"signal {-code}" if code < 0 else f"exit code {code}"
