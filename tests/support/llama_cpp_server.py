"""llama-cpp-python's server as a process: somebody else's engine, as users start it."""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bench.server import free_port
from headrace.models.hub import ensure_default_model

# `make test-engines` makes it; another one can be named.
PYTHON = Path(os.environ.get("LLAMA_CPP_PYTHON", "build/engines/llama-cpp/bin/python"))
MODEL = "smollm2"
START_TIMEOUT_S = 120.0


class LlamaCppServer:
    def __init__(self, log: Path, port: int, threads: int, context: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        arguments = {
            "model": ensure_default_model(),
            "model_alias": MODEL,
            "host": "127.0.0.1",
            "port": port,
            "n_ctx": context,
            "n_threads": threads,
            "n_threads_batch": threads,
            # Else a request ends whichever is under way.
            "interrupt_requests": False,
        }
        command = [str(PYTHON), "-m", "llama_cpp.server"]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def await_ready(self) -> None:
        limit_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < limit_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the engine ended with {self.process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=2):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.1)
        raise TimeoutError("the engine did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def llama_cpp_server(
    log: Path, port: int = 0, *, threads: int = 1, context: int = 2048
) -> Iterator[LlamaCppServer]:
    """One thread, so that two of them and a test have a core each."""
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}: `make test-engines` makes it")
    server = LlamaCppServer(log, port or free_port(), threads, context)
    try:
        server.await_ready()
        yield server
    finally:
        server.kill()
