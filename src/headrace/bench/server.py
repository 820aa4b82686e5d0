"""A headrace server of its own for a benchmark: started, timed until healthy, stopped."""

import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from headrace.core.base.errors import ConfigError, HeadraceError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


class Served(msgspec.Struct, frozen=True):
    url: str
    pid: int
    ready_after_s: float  # process start to the first 200 of /ready


def arguments_of(text: str) -> list[str]:
    """As a shell would cut them. Raises ConfigError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--serve is {text!r}: {str(error).lower()}") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=1) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def served_model(url: str) -> str:
    """The name of the first model that the server at `url` lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        models = msgspec.json.decode(response.read())
    return str(models["data"][0]["id"])


@contextmanager
def serving(arguments: Sequence[str], log: Path) -> Iterator[Served]:
    """`headrace serve` with `arguments` on a free port of 127.0.0.1; its output goes to `log`.
    SIGTERM ends it, too. Raises HeadraceError where it does not start.
    """
    port = free_port()
    words = ["headrace.cli.main", "serve", "--port", str(port), *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with ending_well(), log.open("wb") as output, _started(words, port, output) as server:
        if not server.became_ready():
            raise not_started(server.process.poll(), server.age_s(), log)
        yield Served(server.url, server.process.pid, server.age_s())


@contextmanager
def serving_module(module: str, *words: str) -> Iterator[Served]:
    """`python -m module PORT words`: a part of a benchmark that answers /ready."""
    port = free_port()
    with _started([module, str(port), *words], port) as server:
        if not server.became_ready():
            raise HeadraceError(f"{module} did not start", exit_code=server.process.poll())
        yield Served(server.url, server.process.pid, server.age_s())


class _Server:
    def __init__(self, url: str, process: subprocess.Popen[bytes], started_s: float) -> None:
        self.url = url
        self.process = process
        self._started_s = started_s

    def age_s(self) -> float:
        return time.perf_counter() - self._started_s

    def became_ready(self) -> bool:
        while not is_ready(self.url):
            if self.process.poll() is not None or self.age_s() > START_TIMEOUT_S:
                return False
            time.sleep(0.01)
        return True


@contextmanager
def _started(words: Sequence[str], port: int, output: IO[bytes] | None = None) -> Iterator[_Server]:
    command = [sys.executable, "-m", *words]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield _Server(f"http://127.0.0.1:{port}", process, started_s)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def not_started(exit_code: int | None, waited_s: float, log: Path) -> HeadraceError:
    """With the server's own word, where it has one."""
    told = [
        line.removeprefix("error: ")
        for line in log.read_text("utf-8", "replace").splitlines()
        if line.startswith("error: ")
    ]
    if exit_code == 2 and told:
        return ConfigError(f"server did not start: {told[-1]}", log=log)
    return HeadraceError("server did not start", waited_s=round(waited_s, 1), log=log)


@contextmanager
def ending_well() -> Iterator[None]:
    """SIGTERM ends this process by an exception, so that the server does not stay behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
