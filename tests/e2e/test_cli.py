"""The commands as an operator runs them: processes, signals, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace import __version__
from headrace.core.base.errors import ConfigError
from headrace.core.config.schema import DeviceConfig
from headrace.live.boot import make_backend
from support.tiny_model import write_tiny_model

START_TIMEOUT_S = 60.0
HEADRACE = (sys.executable, "-m", "headrace.cli.main")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def backend() -> str:
    """The backend that users have, or where it is not built the reference."""
    try:
        make_backend(DeviceConfig())
    except ConfigError:
        return "torch"
    return "native"


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`headrace serve` on a port of its own, and the figures that it prints when it is ready."""
    process = subprocess.Popen(
        [*HEADRACE, "serve", "--port", "0", "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, read_figures(process)
    finally:
        process.kill()
        process.communicate()


def read_figures(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The first JSON document of its output, which ends with a brace of its own line."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line == "}\n":
            figures: dict[str, Any] = json.loads(text)
            return figures
    assert process.stderr is not None
    pytest.fail(f"no figures: {text}{process.stderr.read()}")


def request_of(url: str, body: dict[str, object]) -> urllib.request.Request:
    return urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )


def post(url: str, body: dict[str, object]) -> dict[str, Any]:
    with urllib.request.urlopen(request_of(url, body), timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_until_a_signal_and_ends_well(
    number: signal.Signals, model: Path, backend: str
) -> None:
    with started(str(model), "--backend", backend, "--kv-memory", "1MiB") as (process, figures):
        assert figures["model"]["name"] == "tiny"
        memory = figures["memory"]
        parts = ("weights", "activations", "kv", "staging", "other")
        assert memory["total_bytes"] == sum(memory[f"{part}_bytes"] for part in parts)
        assert memory["kv_bytes"] == 1 << 20
        assert figures["kv"]["num_blocks"] * figures["kv"]["block_bytes"] == 1 << 20
        with urllib.request.urlopen(f"{figures['url']}/ready", timeout=10) as response:
            assert json.load(response)["status"] == "open"
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        answer = post(f"{figures['url']}/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 5
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")


def test_a_drain_says_so_and_a_second_signal_ends_it(model: Path, backend: str) -> None:
    """Choices one after another, which would take many seconds."""
    body = {"prompt": "Hello", "n": 64, "max_tokens": 400, "ignore_eos": True, "stream": True}
    arguments = ("--backend", backend, "--max-running-seqs", "1", "--drain-timeout-s", "20")
    with started(str(model), *arguments) as (process, figures):
        assert process.stderr is not None
        with urllib.request.urlopen(
            request_of(f"{figures['url']}/v1/completions", body), timeout=30
        ):
            process.send_signal(signal.SIGINT)
            line = process.stderr.readline()
            assert line == "draining 1 request (up to 20 s); press Ctrl-C again to stop now\n"
            assert process.poll() is None
            begin = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            assert time.monotonic() - begin < 5
        assert (process.returncode, out, err) == (0, "", "")


def test_a_signal_while_loading_ends_at_once(model: Path, backend: str) -> None:
    process = subprocess.Popen(
        [*HEADRACE, "serve", str(model), "--port", "0", "--backend", backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_a_listener(process.pid)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in err
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_has_no_front_end_ends_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sixteen letters!")
    process = subprocess.Popen(
        [*HEADRACE, "worker", "--connect", "127.0.0.1:1", "--secret-file", str(secret)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "no front end at 127.0.0.1 port 1" in process.stderr.readline()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (0, "")


def wait_for_a_listener(pid: int) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with suppress(FileNotFoundError):  # closed while we look
            links = Path(f"/proc/{pid}/fd").iterdir()
            if any(os.readlink(link).startswith("socket:") for link in links):
                return
        time.sleep(0.01)
    pytest.fail("the server did not listen")


def test_a_recorded_server_replays(model: Path, backend: str, tmp_path: Path) -> None:
    log = tmp_path / "events.log"
    with started(str(model), "--backend", backend, "--event-log", str(log)) as (process, figures):
        body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        post(f"{figures['url']}/v1/completions", body)
        process.terminate()
        assert process.wait(30) == 0
    done = subprocess.run(
        [*HEADRACE, "replay", str(log)], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith(" events, every effect as recorded\n")


def test_chat_in_a_pipe(model: Path, backend: str) -> None:
    arguments = [str(model), "--backend", backend, "--max-tokens", "3", "--seed", "1"]
    done = subprocess.run(
        [*HEADRACE, "chat", *arguments],
        input="hello\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")


def test_version_is_answered_before_anything_else_is_imported() -> None:
    ask = "import sys; from headrace.cli.main import main; main(['--version']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
    version, modules = done.stdout.splitlines()
    assert version == f"headrace {__version__}"
    ours = {name for name in modules.split() if name.partition(".")[0] == "headrace"}
    assert ours == {"headrace", "headrace.cli", "headrace.cli.main"}
    assert not {"msgspec", "numpy", "tokenizers", "typer", "click"} & set(modules.split())
