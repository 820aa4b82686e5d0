"""The console script: exit codes, one-line errors, plain output."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import main
from headrace.core.base.errors import OverloadError

COMMANDS = (
    ["serve"],
    ["chat"],
    ["generate"],
    ["pull"],
    ["doctor"],
    ["explain"],
    ["explain", "config"],
    ["replay"],
    ["bench"],
    *(["bench", part] for part in ("all", "baseline", "compare", "install")),
    *(["bench", part] for part in ("kernels", "load", "router", "scheduler")),
)
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    return code, out, err


def test_version(capsys: Capture) -> None:
    assert run(capsys, "--version") == (0, f"headrace {headrace.__version__}\n", "")


def test_version_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys; from headrace.cli.main import main; main(['--version']);"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(re.findall(r"'(\w+)'", done.stdout))
    heavy = {"cyclopts", "rich", "msgspec", "tokenizers", "starlette", "uvicorn", "asyncio"}
    assert "headrace" in loaded
    assert loaded & heavy == set()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command(command: list[str], capsys: Capture) -> None:
    code, out, err = run(capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: headrace {' '.join(command)}")


def test_help_lists_every_command(capsys: Capture) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    for command in COMMANDS:
        assert f"│ {command[0]} " in out


def test_help_needs_no_engine() -> None:
    code = (
        "import sys; from headrace.cli.main import main; main(['serve', '--help']);"
        "print('loaded', sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"tokenizers", "starlette", "uvicorn", "torch"} & set(
        re.findall(r"'(\w+)'", done.stdout.partition("loaded")[2])
    ) == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["srve"], 'unknown command "srve". Did you mean "serve"'),
        (["serve", "--prot", "1"], "unknown option: --prot. Did you mean --port?"),
        (["serve", "a", "b"], "unexpected argument b"),
        (["serve", "--port"], 'command "serve" parameter --port requires an argument'),
        (["serve", "--port", "1", "--port", "2"], "parameter --port specified multiple times"),
        (["replay"], 'command "replay" parameter LOG requires an argument'),
        (["generate", "x", "--top-k", "many"], "invalid value for --top-k"),
        (["generate", "x", "--raw", "--system", "y"], "--system needs the chat template"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: Capture
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert not err.endswith(".\n")


def test_all_wrong_settings_are_told_at_once(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[scheduler]\nstep_token = 5\norder = 'lifo'\n")
    monkeypatch.setenv("HEADRACE_SERVER_PORT", "http")
    code, out, err = run(capsys, "serve", "--config", str(file), "--kv-memory", "1GX")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "error: 4 settings are wrong",
        f"  - unknown setting scheduler.step_token (file {file});"
        " did you mean scheduler.step_tokens?",
        "  - scheduler.order is 'lifo'; choose one of fcfs, priority, longest_prefix, slo_slack"
        f" (file {file})",
        "  - server.port is 'http', not a whole number (env HEADRACE_SERVER_PORT)",
        "  - kv.memory_bytes is '1GX', not a size such as 512MiB (flag --kv-memory)",
    ]


@pytest.mark.parametrize("flag", [[], ["--model"]], ids=["word", "flag"])
@pytest.mark.parametrize(
    "command",
    [["serve", "--port", "0"], ["chat"], ["pull"], ["generate", "x"], ["bench", "kernels"]],
    ids=" ".join,
)
def test_a_model_that_is_not_there(
    command: list[str], flag: list[str], capsys: Capture, tmp_path: Path
) -> None:
    path = str(tmp_path / "none.gguf")
    code, out, err = run(capsys, *command, *flag, path)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"error: {path}: there is no such file or folder",
        "hint: name a GGUF file, a folder of safetensors, or a hub id (org/name[/FILE.gguf])",
    ]


def test_a_path_that_looks_like_a_hub_id_is_no_hub_id(capsys: Capture) -> None:
    code, out, err = run(capsys, "serve", "no/such.gguf", "--port", "0")
    assert (code, out) == (2, "")
    assert err.startswith("error: no/such.gguf: there is no such file or folder\n")


def test_an_address_that_is_taken(capsys: Capture) -> None:
    from headrace.server.listener import bind, url_of

    listener = bind("127.0.0.1", 0)
    try:
        port = url_of(listener).rpartition(":")[2]
        code, out, err = run(capsys, "serve", "no-model.gguf", "--port", port)
    finally:
        listener.close()
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first == f"error: cannot listen on 127.0.0.1 port {port}: address already in use"
    assert second.startswith("hint: ")


def break_pull(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("headrace.cli.pull.resolve_model", fail)


def test_a_fault_of_ours_is_one_line_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    break_pull(monkeypatch, ValueError("odd"))
    assert run(capsys, "pull") == (
        1,
        "",
        "error: unexpected ValueError: odd\n"
        "hint: this is a fault of headrace; --debug shows where it happened\n",
    )


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("module 'headrace.ops.native._native' has no attribute 'bf16_products'"),
        AttributeError("'headrace.ops.native._native.Pool' object has no attribute 'x'"),
        TypeError("__init__(): incompatible function arguments. The following …\n    1. __init__("),
    ],
    ids=["name", "member", "arguments"],
)
def test_an_extension_of_another_version_is_to_be_built_again(
    error: Exception, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_pull(monkeypatch, error)
    code, out, err = run(capsys, "pull")
    first, second = err.splitlines()
    assert (code, out) == (2, "")
    assert first.startswith("error: the native backend was built from other sources: ")
    assert second == "hint: build it again, with pip install . in headrace's checkout"


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_shows_the_traceback(
    how: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_pull(monkeypatch, ValueError("odd"))
    if how == "variable":
        monkeypatch.setenv("HEADRACE_DEBUG", "1")
    code, _, err = run(capsys, "pull", *(["--debug"] if how == "flag" else []))
    assert code == 1
    assert "Traceback" in err
    assert "error: unexpected ValueError: odd" in err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (OverloadError("no room now", retry_after_s=1.0), 1, "error: no room now\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, text: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_pull(monkeypatch, error)
    assert run(capsys, "pull") == (code, "", text)


@pytest.mark.parametrize(
    "trouble",
    [
        # While Python itself ends, and a second one while the command has the first one's end.
        "atexit.register(tell)",
        "atexit.register(tell); sys.modules['headrace.cli.app'] = Telling()",
        "sys.modules['headrace.cli.app'] = Deaf()",
        "sys.modules['headrace.cli.app'] = Losing()",
    ],
    ids=["at exit", "told before", "told twice", "in a callback"],
)
def test_signals_at_the_end_change_nothing(trouble: str) -> None:
    script = f"""
import atexit, os, signal, sys
def tell(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
class Telling:
    run = lambda self, tokens: os.kill(os.getpid(), signal.SIGTERM)
class Deaf:  # as a callback of the interpreter, in which exceptions are lost
    def run(self, tokens):
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                os.kill(os.getpid(), number)
            except SystemExit:
                pass
        return 1
class Last:
    __del__ = lambda self: os.kill(os.getpid(), signal.SIGTERM)
class Losing:
    def run(self, tokens):
        Last()
        return 1
class Ended:
    run = lambda self, tokens: 0
sys.modules["headrace.cli.app"] = Ended()
{trouble}
from headrace.cli.main import main
sys.argv = ["headrace", "serve"]
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_reader_that_has_had_enough_is_no_fault() -> None:
    """As `headrace explain config | head -1`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "explain", "config", "--json"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("to", "code", "words"),
    [(">&-", 0, ""), (">/dev/full", 1, "error: cannot write: no space left on device\n")],
)
def test_an_answer_that_has_nowhere_to_go(to: str, code: int, words: str) -> None:
    words_of_it = "plan roofline --preset reference-70b-h100 --json"
    line = f"{sys.executable} -m headrace.cli.main {words_of_it} {to}"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, [one for one in done.stderr.splitlines() if "error" in one]) == (
        code,
        words.splitlines(),
    )
