"""`headrace doctor`: what each check says of a machine that we make up."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.checks import Check, Status
from headrace.cli.checks.machine import check_cores, check_cpu, check_load, check_memory
from headrace.cli.checks.model import check_cache, check_model
from headrace.cli.checks.program import check_core, check_native, check_port, check_torch
from headrace.cli.main import main
from headrace.core.config.merge import from_settings
from headrace.core.config.resolve import MachineFacts
from headrace.core.config.schema import Config
from headrace.models.hub import DEFAULT_MODEL
from headrace.server.listener import bind, url_of
from support.tiny_model import write_tiny_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_default_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def only(checks: Any) -> Check:
    (check,) = checks
    assert isinstance(check, Check)
    return check


def set_machine(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    known = {"num_cores": 4, "total_bytes": 16 << 30, "available_bytes": 8 << 30, **facts}
    machine = MachineFacts(**known)
    monkeypatch.setattr("headrace.cli.checks.machine.machine_facts", lambda: machine)


def test_a_sound_setup_is_told_and_changes_nothing(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    arguments = [str(path), "--backend", "torch", "--port", "0", "--json"]
    assert main(["doctor", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_ok"] is True
    by_name = {check["name"]: check for check in report["checks"]}
    assert {
        "settings",
        "python",
        "native",
        "core",
        "torch",
        "cpu",
        "cores",
        "load",
        "memory",
    } <= set(by_name)
    assert by_name["model"]["num_parameters"] == 90_752
    assert by_name["KV"]["kv"]["num_blocks"] == 256 * 32
    assert by_name["KV"]["memory"]["kv_bytes"] == 256 * 32 * 4096
    assert not (tmp_path / "cache").exists()


def test_a_template_that_serve_would_refuse_is_a_failure(capsys: Capture, tmp_path: Path) -> None:
    model, template = write_tiny_model(tmp_path / "tiny.gguf"), tmp_path / "own.jinja"
    template.touch()
    arguments = [str(model), "--chat-template", str(template), "--backend", "torch", "--port", "0"]
    assert main(["doctor", *arguments]) == 1
    assert "own.jinja: the chat template is empty" in capsys.readouterr().out


def test_one_failure_is_exit_code_1(capsys: Capture, tmp_path: Path) -> None:
    assert main(["doctor", str(tmp_path / "none.gguf"), "--port", "0"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    (line,) = [line for line in out.splitlines() if line.split()[1:2] == ["model"]]
    assert line.startswith("fail")
    assert line.endswith("none.gguf: there is no such file or folder")


def test_wrong_settings_are_one_finding_among_others(capsys: Capture) -> None:
    assert main(["doctor", "--step-tokens", "0", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert checks[0]["name"] == "settings"
    assert checks[0]["status"] == "fail"
    assert "scheduler.step_tokens is 0" in checks[0]["detail"]
    assert "python" in {check["name"] for check in checks}


def test_cpu_features(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: A CPU\nflags\t\t: fpu avx2 f16c fma avx512f\n")
    check = only(check_cpu(Config(), cpuinfo))
    assert check.detail == "A CPU: avx2, fma, f16c, avx512f"
    assert check.data["features"] == ["avx2", "fma", "f16c", "avx512f"]
    assert only(check_cpu(Config(), tmp_path / "none")).status is Status.OK


def test_more_threads_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, num_cores=2)
    assert only(check_cores(Config())).status is Status.OK
    check = only(check_cores(from_settings({"threads": 3})))
    assert check.status is Status.WARN
    assert "--threads 2" in check.hint


@pytest.mark.parametrize(("load", "status"), [(1.9, Status.OK), (2.1, Status.WARN)])
def test_a_busy_machine_is_a_warning(
    load: float, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine(monkeypatch, num_cores=4)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert only(check_load(Config())).status is status


def test_a_container_limit_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("2147483648\n")
    set_machine(monkeypatch, available_bytes=2 << 30)
    check = only(check_memory(Config(), limit))
    assert check.detail.endswith("this container may have 2.00 GiB")
    limit.write_text("max\n")
    assert only(check_memory(Config(), limit)).data["container_limit_bytes"] is None
    set_machine(monkeypatch, available_bytes=1 << 29)
    assert only(check_memory(Config(), limit)).status is Status.WARN


def test_an_extension_of_another_version_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("_native")
    monkeypatch.setitem(sys.modules, "headrace.ops.native._native", old)
    monkeypatch.setattr("headrace.ops.native._native", old, raising=False)
    check = only(check_native(Config()))
    assert (check.status, check.hint) == (Status.FAIL, "build it with pip install .")


@pytest.mark.parametrize(("backend", "isa"), [("native", "neon"), ("torch", "portable")])
def test_an_instruction_set_that_is_not_there_fails(
    backend: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.ops.native import _native

    monkeypatch.setattr(_native, "usable_isas", lambda: ["portable", "avx2"])
    monkeypatch.setattr(_native, "fastest_isa", lambda: "avx2")
    check = only(check_native(from_settings({"backend": backend, "isa": isa})))
    assert check.status is Status.FAIL
    assert f"--isa is {isa}" in check.detail
    assert check.data["usable_isas"] == ["portable", "avx2"]


def test_it_says_why_amx_goes_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.ops.native._native.amx_refusal", lambda: "there is no room")
    monkeypatch.setattr("headrace.ops.native._native.fastest_isa", lambda: "avx2")
    monkeypatch.setattr("headrace.ops.native._native.usable_isas", lambda: ["portable", "avx2"])
    check = only(check_native(Config()))
    assert check.status is Status.WARN
    assert check.detail == "avx2 chosen of portable, avx2; no amx, as there is no room"


def test_no_native_extension_fails_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "headrace.ops.native._native", None)
    monkeypatch.delattr("headrace.ops.native._native", raising=False)
    assert only(check_native(Config())).status is Status.FAIL
    assert only(check_native(from_settings({"backend": "torch"}))).status is Status.OK


def test_it_says_whether_the_core_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for file, is_compiled in (("a/scheduler.py", False), ("a/scheduler.abi3.so", True)):
        monkeypatch.setattr("headrace.core.scheduler.scheduler.__file__", file)
        check = only(check_core(Config()))
        assert (check.status, check.data) == (Status.OK, {"is_compiled": is_compiled})


def test_no_torch_fails_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert only(check_torch(Config())).status is Status.OK
    assert only(check_torch(from_settings({"backend": "torch"}))).status is Status.FAIL


def test_a_taken_port_fails_and_a_free_one_is_given_back() -> None:
    listener = bind("127.0.0.1", 0)
    port = int(url_of(listener).rpartition(":")[2])
    config = from_settings({"port": port})
    assert only(check_port(config)).status is Status.FAIL
    listener.close()
    assert only(check_port(config)).status is Status.OK
    bind("127.0.0.1", port).close()


def test_an_address_that_others_reach_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.listener.bind", lambda host, port: bind("127.0.0.1", 0))
    _, check = check_port(from_settings({"host": "0.0.0.0"}))
    assert (check.name, check.status) == ("address", Status.WARN)


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))
    assert only(check_cache(Config())).status is Status.FAIL
    # A model of one's own needs no cache.
    assert only(check_cache(from_settings({"path": "m.gguf"}))).status is Status.WARN


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = DEFAULT_MODEL.num_bytes

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    check = only(check_cache(Config()))
    assert check.status is Status.FAIL
    assert check.data["free_bytes"] == DEFAULT_MODEL.num_bytes


@pytest.mark.parametrize(
    ("path", "status", "hint"),
    [
        ("", Status.WARN, "headrace pull fetches it now"),
        ("org/name", Status.WARN, "headrace pull org/name"),
        ("org/name-1.5", Status.WARN, "headrace pull org/name-1.5"),
        ("org/name/m.gguf", Status.WARN, "headrace pull org/name/m.gguf"),
        ("no/such.gguf", Status.FAIL, "name a GGUF file"),
        ("./name", Status.FAIL, "name a GGUF file"),
        ("model.gguf", Status.FAIL, "name a GGUF file"),
    ],
)
def test_a_model_that_is_not_here(path: str, status: Status, hint: str) -> None:
    check = only(check_model(from_settings({"path": path})))
    assert check.status is status
    assert check.hint.startswith(hint)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"nonsense")
    check = only(check_model(from_settings({"path": str(path)})))
    assert check.status is Status.FAIL
    assert "not a GGUF file" in check.detail


def test_a_model_whose_kv_does_not_fit(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    check = only(check_model(from_settings({"path": str(path), "memory_bytes": 4096})))
    assert check.status is Status.FAIL
    assert check.hint == "--kv-memory 128KiB is enough, or --max-model-len 16"
