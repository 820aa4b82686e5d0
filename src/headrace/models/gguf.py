"""GGUF files, versions 2 and 3, little-endian: a reader that maps the file and believes nothing it
says.

The layout (header, key-value pairs, tensor table, aligned data) is that of the GGUF specification
in the ggml project. Every length is checked against the bytes that remain before anything of that
length is made.
"""

import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.base.errors import ConfigError
from headrace.models.tensors import Extent, StoredTensor, check_extents, map_file

MAGIC = b"GGUF"

# id -> (name, values in a block, bytes of a block); a block of 0 bytes = known by name only.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    30: ("bf16", 1, 2),
} | {
    id_: (name, 1, 0)
    for id_, name in {
        9: "q8_1", 10: "q2_k", 11: "q3_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs",
        18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs",
        24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 34: "tq1_0",
        35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0",
    }.items()
}  # fmt: skip

# Value type id -> struct format of a scalar; 7 (bool), 8 (string) and 9 (array) are read in their
# own way.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

_MAX_NAME_BYTES = 65_535
_MAX_DIMS = 4


class GgufFile:
    """The metadata and the tensors of one file.

    Metadata values are int, float, bool, str, list[str], or array (numbers); arrays of arrays are
    left out, as no model here needs them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        cursor = _Cursor(path, map_file(path))
        magic = bytes(cursor.take(4)) if cursor.remaining >= 4 else b""
        if magic != MAGIC:
            raise ConfigError(
                f"{path}: not a GGUF file: it starts with {magic!r}",
                hint="headrace serves GGUF files and folders of safetensors",
            )
        version = cursor.scalar("I")
        if version not in (2, 3):
            found = "a big-endian file" if version >= 1 << 16 else f"version {version}"
            raise ConfigError(
                f"{path}: GGUF {found}; supported are versions 2 and 3, little-endian"
            )
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = _metadata(cursor, num_values)
        self.tensors = _tensors(cursor, num_tensors, self.metadata)

    @property
    def file_bytes(self) -> int:
        return self.path.stat().st_size


class _Cursor:
    """A position in the mapped bytes. Reading past the end is the one fault that every read can
    meet.
    """

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.at = 0

    @property
    def remaining(self) -> int:
        return self.data.nbytes - self.at

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > self.remaining:
            raise self.truncated()
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def scalar(self, format: str) -> Any:
        return struct.unpack("<" + format, self.take(struct.calcsize("<" + format)))[0]

    def string(self, max_bytes: int) -> str:
        length = self.scalar("Q")
        if length > max_bytes:
            raise ConfigError(
                f"{self.path}: a name of {length} bytes; at most {max_bytes} are allowed"
            )
        return self._text(self.take(length))

    def strings(self, count: int) -> list[str]:
        """`count` strings. A tight loop over the map itself, as vocabularies hold 10⁵ of them."""
        data: Any = self.data.obj
        at, end = self.at, self.data.nbytes
        unpack_length = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        append = texts.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack_length(data, at)[0]
                append(data[start:at].decode())
        except struct.error:
            raise self.truncated() from None
        except UnicodeDecodeError:
            raise self._not_text() from None
        if at > end:
            raise self.truncated()
        self.at = at
        return texts

    def truncated(self) -> ConfigError:
        return ConfigError(
            f"{self.path}: the file is truncated or damaged:"
            " its header needs more bytes than there are",
            hint="fetch the file again",
        )

    def _text(self, data: memoryview) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            raise self._not_text() from None

    def _not_text(self) -> ConfigError:
        return ConfigError(f"{self.path}: a text at byte {self.at} is not valid UTF-8")


def _metadata(cursor: _Cursor, count: int) -> dict[str, object]:
    # A key, its type and its value take at least 13 bytes.
    if count * 13 > cursor.remaining:
        raise cursor.truncated()
    metadata: dict[str, object] = {}
    for _ in range(count):
        key = cursor.string(_MAX_NAME_BYTES)
        if key in metadata:
            raise ConfigError(f"{cursor.path}: metadata key {key!r} appears twice")
        value = _value(cursor, cursor.scalar("I"))
        if value is not None:
            metadata[key] = value
    return metadata


def _value(cursor: _Cursor, type_: int) -> object:
    if type_ == _ARRAY:
        return _array(cursor, cursor.scalar("I"), cursor.scalar("Q"))
    if type_ == _STRING:
        return cursor.string(cursor.remaining)
    if type_ == _BOOL:
        return cursor.scalar("B") != 0
    if type_ in _SCALARS:
        return cursor.scalar(_SCALARS[type_])
    raise ConfigError(f"{cursor.path}: metadata value of unknown type {type_}")


def _array(cursor: _Cursor, type_: int, count: int, depth: int = 0) -> object:
    if type_ == _STRING:
        return cursor.strings(count)
    if type_ == _ARRAY:
        if depth == 4:
            raise ConfigError(f"{cursor.path}: metadata arrays are nested too deeply")
        for _ in range(count):
            _array(cursor, cursor.scalar("I"), cursor.scalar("Q"), depth + 1)
        return None
    format = "B" if type_ == _BOOL else _SCALARS.get(type_)
    if format is None:
        raise ConfigError(f"{cursor.path}: metadata array of unknown type {type_}")
    return array(format, cursor.take(count * struct.calcsize("<" + format)).tobytes())


def _tensors(
    cursor: _Cursor, count: int, metadata: Mapping[str, object]
) -> dict[str, StoredTensor]:
    # A name, the number of dimensions, one of them, the type and the offset take at least 32 bytes.
    if count * 32 > cursor.remaining:
        raise cursor.truncated()
    table = [_tensor_entry(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
        raise ConfigError(f"{cursor.path}: general.alignment is {alignment!r}")
    data = cursor.data[-(-cursor.at // alignment) * alignment :]
    check_extents(cursor.path, (extent for extent, _, _ in table), data.nbytes)
    tensors: dict[str, StoredTensor] = {}
    for extent, type_, shape in table:
        if extent.name in tensors:
            raise ConfigError(f"{cursor.path}: tensor {extent.name} appears twice")
        part = data[extent.start : extent.start + extent.num_bytes]
        tensors[extent.name] = StoredTensor(extent.name, type_, shape, part)
    return tensors


def _tensor_entry(cursor: _Cursor) -> tuple[Extent, str, tuple[int, ...]]:
    name = cursor.string(_MAX_NAME_BYTES)
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ConfigError(f"{cursor.path}: tensor {name} has {num_dims} dimensions")
    # The file lists the innermost dimension first.
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    type_id, start = cursor.scalar("I"), cursor.scalar("Q")
    type_, block_size, block_bytes = TENSOR_TYPES.get(type_id, (f"type {type_id}", 1, 0))
    if shape[-1] % block_size or 0 in shape:
        blocks = f": its rows are blocks of {block_size} values" if block_size > 1 else ""
        raise ConfigError(
            f"{cursor.path}: tensor {name} of type {type_} cannot have shape {list(shape)}{blocks}"
        )
    num_bytes = shape[-1] // block_size * block_bytes
    for size in shape[:-1]:
        num_bytes *= size
    return Extent(name, start, num_bytes), type_, shape
