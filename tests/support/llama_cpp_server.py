"""llama-cpp-python's server as a process: somebody else's engine, as users start it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bench.server import free_port
from headrace.models.hub import ensure_default_model
from support.engine_process import EngineProcess

# `make test-engines` makes it; another one can be named.
PYTHON = Path(os.environ.get("LLAMA_CPP_PYTHON", "build/engines/llama-cpp/bin/python"))
MODEL = "smollm2"
START_TIMEOUT_S = 120.0


class LlamaCppServer(EngineProcess):
    def __init__(
        self,
        log: Path,
        port: int,
        *,
        threads: int = 1,
        context: int = 2048,
        python: Path = PYTHON,
        model: str = MODEL,
    ) -> None:
        """One thread, so that two of them and a test have a core each."""
        arguments = {
            "model": ensure_default_model(),
            "model_alias": model,
            "host": "127.0.0.1",
            "port": port,
            "n_ctx": context,
            "n_threads": threads,
            "n_threads_batch": threads,
            # Else a request ends whichever is under way.
            "interrupt_requests": False,
        }
        command = [str(python), "-m", "llama_cpp.server"]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        super().__init__(command, f"http://127.0.0.1:{port}", log, {})


@contextmanager
def llama_cpp_server(log: Path, port: int = 0) -> Iterator[LlamaCppServer]:
    """Skips the test where it is not installed."""
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}: `make test-engines` makes it")
    server = LlamaCppServer(log, port or free_port())
    try:
        server.await_ready(START_TIMEOUT_S)
        yield server
    finally:
        server.kill()
