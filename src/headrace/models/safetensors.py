"""Folders of safetensors with a config.json: a reader that maps the shards and believes nothing
they say.

The layout of a shard (length, JSON header, data) is that of the safetensors specification.
"""

import struct
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.config.units import format_bytes
from headrace.models.files import read_bounded
from headrace.models.tensors import Extent, StoredTensor, check_extents, map_file

# Type name in a header -> (our name, bytes of a value); 0 bytes = known by name only.
TENSOR_TYPES = {"F32": ("f32", 4), "F16": ("f16", 2), "BF16": ("bf16", 2), "I32": ("i32", 4)}

MAX_HEADER_BYTES = 100 << 20
MAX_JSON_BYTES = 64 << 20
MAX_NAMED = 10
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class ModelFolder:
    """A model folder's JSON files, on request."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def json(self, name: str) -> dict[str, object] | None:
        """The object in a JSON file of the folder, None where there is no such file."""
        path = self.path / name
        if not path.is_file():
            return None
        values: dict[str, object] = _decoded(
            path, read_bounded(path, MAX_JSON_BYTES), dict[str, Any]
        )
        return values


class SafetensorsFolder(ModelFolder):
    """The config and the tensors of one model folder, too."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        config = self.json("config.json")
        if config is None:
            raise ConfigError(f"{path}: the folder has no config.json", hint=_other_hint(path))
        self.config = config
        self.tensors: dict[str, StoredTensor] = {}
        self.file_bytes = 0
        if (path / _WEIGHTS).is_file():
            self._add_shard(path / _WEIGHTS)
        elif (path / _INDEX).is_file():
            self._add_indexed_shards(path / _INDEX)
        else:
            raise ConfigError(
                f"{path}: the folder has neither {_WEIGHTS} nor {_INDEX}", hint=_other_hint(path)
            )

    def _add_indexed_shards(self, index: Path) -> None:
        weight_map = _decoded(index, read_bounded(index, MAX_JSON_BYTES), _Index).weight_map
        for name in sorted(set(weight_map.values())):
            if name != Path(name).name or not name.endswith(".safetensors"):
                raise ConfigError(f"{index}: {name!r} is not the name of a shard in this folder")
            if not (self.path / name).is_file():
                raise ConfigError(
                    f"{index}: shard {name} is missing", hint="fetch the folder again"
                )
            self._add_shard(self.path / name)
        for tensor, shard in weight_map.items():
            if tensor not in self.tensors:
                raise ConfigError(f"{index}: tensor {tensor} is not in {shard}")

    def _add_shard(self, path: Path) -> None:
        data = map_file(path)
        self.file_bytes += data.nbytes
        for name, tensor in read_shard(path, data).items():
            if name in self.tensors:
                raise ConfigError(f"{path}: tensor {name} appears in two shards")
            self.tensors[name] = tensor


def read_shard(path: Path, data: memoryview) -> dict[str, StoredTensor]:
    """The tensors of one .safetensors file, given its bytes."""
    if data.nbytes < 8:
        raise ConfigError(f"{path}: not a safetensors file: only {data.nbytes} bytes")
    (header_bytes,) = struct.unpack("<Q", data[:8])
    if header_bytes > min(MAX_HEADER_BYTES, data.nbytes - 8):
        raise ConfigError(
            f"{path}: not a safetensors file, or truncated:"
            f" its header would take {format_bytes(header_bytes)}",
            hint="fetch the file again",
        )
    header = _decoded(path, data[8 : 8 + header_bytes], dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    body = data[8 + header_bytes :]
    entries = {name: _decoded(path, raw, _Entry) for name, raw in header.items()}
    extents = {name: _extent(path, name, entry) for name, entry in entries.items()}
    check_extents(path, extents.values(), body.nbytes)
    return {
        name: StoredTensor(
            name,
            TENSOR_TYPES.get(entry.dtype, (entry.dtype.lower(), 0))[0],
            tuple(entry.shape),
            body[slice(*entry.data_offsets)],
        )
        for name, entry in entries.items()
    }


def _extent(path: Path, name: str, entry: _Entry) -> Extent:
    start, end = entry.data_offsets
    num_values = 1
    for size in entry.shape:
        num_values *= size
    value_bytes = TENSOR_TYPES.get(entry.dtype, ("", 0))[1]
    if not 0 <= start <= end or min(entry.shape, default=1) < 1:
        raise ConfigError(f"{path}: tensor {name} has shape {entry.shape} at [{start}, {end})")
    if value_bytes and num_values * value_bytes != end - start:
        raise ConfigError(
            f"{path}: tensor {name} of type {entry.dtype} and shape {entry.shape}"
            f" has {end - start} bytes"
        )
    return Extent(name, start, end - start)


def _decoded(path: Path, data: Any, type_: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not the JSON that is expected there: {error}") from None


def _other_hint(path: Path) -> str:
    """What the folder holds instead, where that says what to do."""
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return f"to serve the GGUF file in it, name that file: {ggufs[0]}"
    if ggufs:
        names = ", ".join(gguf.name for gguf in ggufs[:MAX_NAMED])
        more = f" and {len(ggufs) - MAX_NAMED} more" if len(ggufs) > MAX_NAMED else ""
        return f"to serve a GGUF file in it, name that file; there are {names}{more}"
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        return "only safetensors and GGUF are read: pickled weights (.bin, .pt) can run code"
    return "a model is a GGUF file or a folder with config.json, tokenizer.json and safetensors"
