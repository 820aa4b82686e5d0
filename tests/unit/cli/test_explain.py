"""`headrace explain config`, and with it every flag, variable and file."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.core.config.settings import SETTINGS, Setting
from support.tiny_model import write_tiny_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_default_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def explain(capsys: Capture, *arguments: str) -> dict[str, dict[str, Any]]:
    assert main(["explain", "config", "--json", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    figures: dict[str, dict[str, Any]] = json.loads(out)
    return figures


def another(setting: Setting) -> Any:
    """A value that is allowed and not the default."""
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    if setting.type is bool:
        return not setting.default
    if setting.type is str:
        return "other"
    if setting.type is tuple:
        return ["one"]
    least = max(7, setting.low or 0)
    return setting.type(least if setting.high is None else min(least, setting.high))


def text(value: Any) -> str:
    """As a flag or a variable takes it."""
    return ",".join(value) if isinstance(value, list) else str(value)


def test_every_setting_is_listed(capsys: Capture) -> None:
    figures = explain(capsys)
    assert list(figures) == list(SETTINGS)
    for key, entry in figures.items():
        assert entry["source"] == "default"
        default = SETTINGS[key].default
        assert entry["asked"] == (list(default) if isinstance(default, tuple) else default)
        assert entry["help"] == SETTINGS[key].help


def test_every_flag_reaches_its_setting(capsys: Capture) -> None:
    arguments: list[str] = []
    wanted = {}
    for key, setting in SETTINGS.items():
        if key == "model.path":
            continue
        wanted[key] = value = another(setting)
        if setting.type is bool:
            arguments.append(setting.flag if value else f"--no-{setting.flag[2:]}")
        else:
            arguments += [setting.flag, text(value)]
    figures = explain(capsys, *arguments)
    assert {key: figures[key]["asked"] for key in wanted} == wanted
    assert {figures[key]["source"] for key in wanted} == {
        f"flag {SETTINGS[key].flag}" for key in wanted
    }


def test_every_variable_reaches_its_setting(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {key: another(setting) for key, setting in SETTINGS.items()}
    for key, value in wanted.items():
        monkeypatch.setenv(SETTINGS[key].variable, text(value))
    figures = explain(capsys)
    assert {key: entry["asked"] for key, entry in figures.items()} == wanted


def test_flag_over_variable_over_file(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[server]\nport = 1\nmax_n = 1\nhost = 'a'\n")
    monkeypatch.setenv("HEADRACE_SERVER_PORT", "2")
    monkeypatch.setenv("HEADRACE_SERVER_MAX_N", "2")
    figures = explain(capsys, "--config", str(file), "--port", "3")
    assert [figures[f"server.{name}"]["value"] for name in ("port", "max_n", "host")] == [3, 2, "a"]
    assert figures["server.host"]["source"] == f"file {file}"


def test_the_file_comes_from_the_variable_and_the_flag_wins(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(f"[model]\nname = '{name}'\n")
    monkeypatch.setenv("HEADRACE_CONFIG", str(tmp_path / "a.toml"))
    assert explain(capsys)["model.name"]["value"] == "a"
    file = str(tmp_path / "b.toml")
    assert explain(capsys, "--config", file)["model.name"]["value"] == "b"


def test_a_file_in_the_current_folder_is_not_read(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "headrace.toml").write_text("[server]\nport = 1\n")
    monkeypatch.chdir(tmp_path)
    assert explain(capsys)["server.port"]["source"] == "default"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["absent", "binary"])
def test_a_file_that_cannot_be_read(content: bytes | None, capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    if content is not None:
        file.write_bytes(content)
    assert main(["explain", "config", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(file) in err


def test_the_model_fills_in_what_depends_on_it(capsys: Capture, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    figures = explain(capsys, str(path), "--max-running-seqs", "4")
    assert figures["model.path"]["source"] == "argument MODEL"
    assert figures["model.name"]["value"] == "tiny"
    assert figures["model.max_model_len"]["value"] == 512
    assert figures["kv.memory_bytes"]["value"] == 4 * 32 * 4096
    assert figures["kv.memory_bytes"]["reason"] == "all that 4 sequences of 512 tokens use"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("1GB", "1GB"), ("1GiB", "1GiB"), ("1234567KiB", "1234567KiB (1.18 GiB)"), ("0", "0")],
)
def test_a_size_is_shown_as_people_write_it(given: str, shown: str, capsys: Capture) -> None:
    assert main(["explain", "config", "no/model", "--kv-memory", given]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("kv.memory")]
    assert f" {shown} " in line


def test_the_kv_type_decides_what_a_block_takes(capsys: Capture, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    values = {}
    for dtype in ("bf16", "int8", "fp8"):
        figures = explain(capsys, str(path), "--max-running-seqs", "4", "--kv-dtype", dtype)
        values[dtype] = figures["kv.memory_bytes"]["value"]
    # Heads of 16: two bytes, one byte, one byte and a scale for each key and value.
    assert values == {k: 4 * 32 * 128 * n for k, n in (("bf16", 32), ("int8", 20), ("fp8", 16))}


def test_a_model_that_does_not_fit_still_gets_an_explanation(
    capsys: Capture, tmp_path: Path
) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    assert main(["explain", "config", str(path), "--kv-memory", "1KiB"]) == 0
    out = capsys.readouterr().out
    assert "what depends on the model is open: a KV pool of 1.00 KiB holds 0 tokens" in out


def test_the_table_is_plain_and_one_line_for_each_setting(capsys: Capture) -> None:
    assert main(["explain", "config", "--no-prefix-cache"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\x1b" not in out
    assert lines == [line.rstrip() for line in lines]
    assert [line.split()[0] for line in lines[1 : len(SETTINGS) + 1]] == list(SETTINGS)
    (line,) = [line for line in lines if line.startswith("kv.prefix_cache")]
    assert line.split()[1:4] == ["false", "flag", "--prefix-cache"]


def test_a_workload_brings_its_limits_and_whatever_says_one_is_over_it(capsys: Capture) -> None:
    found = explain(capsys, "--workload", "agent", "--slo-ttft-ms", "700")
    limits = {name: found[f"telemetry.slo_{name}_ms"] for name in ("ttft", "itl", "tpot", "e2e")}
    assert {name: one["asked"] for name, one in limits.items()} == {
        "ttft": 700.0,
        "itl": 0.0,
        "tpot": 0.0,
        "e2e": 15000.0,
    }
    assert limits["ttft"]["source"] == "flag --slo-ttft-ms"
    assert limits["e2e"]["source"] == "workload agent"
