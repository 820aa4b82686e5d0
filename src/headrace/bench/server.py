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
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.perf_counter()
    with ending_well():
        with log.open("wb") as output:
            process = subprocess.Popen([*command, *arguments], stdout=output, stderr=output)
        try:
            while not is_ready(url):
                waited_s = time.perf_counter() - started_s
                if process.poll() is not None or waited_s > START_TIMEOUT_S:
                    raise not_started(process.returncode, waited_s, log)
                time.sleep(0.01)
            yield Served(url, process.pid, time.perf_counter() - started_s)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
