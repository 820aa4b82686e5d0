"""Somebody else's engine as a process: started, awaited until it lists its models, ended."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

STOP_TIMEOUT_S = 10.0


class EngineProcess:
    """It and its children are a group of their own, and end together."""

    def __init__(
        self, command: Sequence[str], url: str, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.url = url
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def await_ready(self, timeout_s: float) -> None:
        """Raises RuntimeError where it ends, and TimeoutError."""
        limit_s = time.monotonic() + timeout_s
        while time.monotonic() < limit_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the engine ended with {self.process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=2):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        raise TimeoutError(f"the engine did not start within {timeout_s:g} s")

    def stop(self) -> None:
        """By its leave where it gives it in time."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """With all that it has started. Idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
