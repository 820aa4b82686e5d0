"""Tensors as a model file stores them, whatever the file's format.

Decides which stored tensors an architecture may take and when a file does not fit it; refuses to
know how a weight is computed with.
"""

import hashlib
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from headrace.core.base.errors import ConfigError
from headrace.core.config.units import format_bytes
from headrace.models.files import open_regular
from headrace.models.groups import Grouping, grouped_view
from headrace.ops.interface import Backend, TensorView, WeightType

W = TypeVar("W")

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

# Matrices in groups become the others.
_STORED_TYPES = tuple(t for t in WeightType if t not in (WeightType.Q4_G32, WeightType.Q4_G128))

# Digests read at most this much of one tensor: whole small tensors, evenly spread pages of large
# ones.
_PAGE_BYTES = 4096
_SAMPLED_PAGES = 8


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a file: `shape` is row-major, outermost dimension first."""

    name: str
    type: str  # the file's own name of the type, lower case
    shape: tuple[int, ...]
    data: memoryview  # exactly the tensor's bytes; empty for types that are not supported


class Extent(msgspec.Struct, frozen=True):
    """Where a tensor lies in the data part of its file."""

    name: str
    start: int
    num_bytes: int


def map_file(path: Path) -> memoryview:
    """The file's bytes, memory-mapped and read-only; the mapping lives as long as a view of it
    does.
    """
    try:
        with open_regular(path) as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:
        raise ConfigError(f"{path}: the file is empty", hint="fetch the file again") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def check_extents(path: Path, extents: Iterable[Extent], data_bytes: int) -> None:
    """Every tensor lies inside the file and none overlaps another; ConfigError otherwise."""
    end, owner = 0, ""
    for extent in sorted(extents, key=lambda extent: extent.start):
        if extent.start + extent.num_bytes > data_bytes:
            missing = extent.start + extent.num_bytes - data_bytes
            raise ConfigError(
                f"{path}: the file is truncated:"
                f" tensor {extent.name} ends {format_bytes(missing)} after its end",
                hint="fetch the file again",
            )
        if extent.start < end:
            raise ConfigError(f"{path}: tensors {owner} and {extent.name} overlap")
        end, owner = extent.start + extent.num_bytes, extent.name


class WeightReader(Generic[W]):
    """Takes the tensors of a file one by one into a backend, and keeps account of them.

    Every fault is a ConfigError that names the file and the tensor. `digest` and `finish` speak of
    the tensors taken so far.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, StoredTensor],
        backend: Backend[Any, W],
        on_progress: OnProgress | None = None,
        grouping: Grouping | None = None,
    ) -> None:
        self.path = path
        self._tensors = tensors
        self._backend = backend
        self._on_progress = on_progress
        self._grouping = grouping
        self._taken: dict[str, StoredTensor] = {}
        self.num_parameters = 0
        self._matrix_bytes: dict[str, int] = {}  # by the name of the type
        self._bytes_taken = 0
        self._bytes_total = sum(tensor.data.nbytes for tensor in tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def vector(self, name: str, size: int) -> W:
        return self._load(name, (size,))

    def matrix(self, name: str, rows: int, cols: int) -> W:
        """The tensor `name`, or, in a folder of matrices in groups, those that stand for it."""
        if self._grouping is None or name in self._tensors:
            return self._load(name, (rows, cols))
        return self._load_grouped(self._grouping, name, (rows, cols))

    def floats(self, name: str, size: int) -> tuple[float, ...]:
        """A small f32 vector that the model's own arithmetic needs rather than the backend."""
        tensor = self._take(name, (size,))
        if tensor.type != WeightType.F32:
            raise ConfigError(f"{self.path}: tensor {name} has type {tensor.type}, not f32")
        self._count((size,), tensor.type, tensor.data.nbytes)
        return tuple(tensor.data.cast("f"))

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """A tensor that nobody took means an architecture that would be computed wrongly."""
        for name, tensor in self._tensors.items():
            if name not in self._taken and not ignored(name) and not self._adds_nothing(tensor):
                raise ConfigError(
                    f"{self.path}: tensor {name} is not part of the stated architecture",
                    hint="the file needs an architecture that headrace does not have",
                )

    @property
    def weight_types(self) -> str:
        """Types of the matrices, the one with the most bytes first: "q4_1 + q8_0"."""
        return " + ".join(sorted(self._matrix_bytes, key=lambda t: (-self._matrix_bytes[t], t)))

    def digest(self, identity: bytes) -> str:
        """SHA-256 over `identity` and, for each tensor taken, its name, type, shape and sampled
        contents.

        Tensors of up to 32 KiB count whole, of larger ones eight 4 KiB pages that are spread
        evenly, the last page included. This tells models, fine-tunes and quantisations apart in
        milliseconds, whatever their size; it does not prove that a file is undamaged.
        """
        total = hashlib.sha256(b"headrace model 1\0" + identity)
        if self._grouping is not None:
            total.update(msgspec.json.encode(self._grouping))
        for name in sorted(self._taken):
            tensor = self._taken[name]
            total.update(f"\0{name}\0{tensor.type}\0{tensor.shape}\0".encode())
            for part in _sampled(tensor.data):
                total.update(part)
        return total.hexdigest()

    def _load(self, name: str, shape: tuple[int, ...]) -> W:
        tensor = self._take(name, shape)
        rows, cols = shape if len(shape) == 2 else (1, shape[0])
        type_ = WeightType(tensor.type)
        self._count(shape, tensor.type, tensor.data.nbytes)
        return self._backend.load_weight(TensorView(name, type_, rows, cols, tensor.data))

    def _load_grouped(self, grouping: Grouping, name: str, shape: tuple[int, int]) -> W:
        stem = name.removesuffix("weight")
        parts = grouping.parts(*shape)
        if stem + "g_idx" in self._tensors:
            parts["g_idx"] = ("i32",), (shape[1],)
        stored = {
            part: self._take(stem + part, part_shape, types)
            for part, (types, part_shape) in parts.items()
        }
        tensors = {part: tensor.data for part, tensor in stored.items()}
        is_bf16 = stored["scales"].type == WeightType.BF16
        view = grouped_view(self.path, grouping, name, shape, tensors, bf16_scales=is_bf16)
        self._count(shape, grouping.label, sum(data.nbytes for data in tensors.values()))
        return self._backend.load_weight(view)

    def _count(self, shape: tuple[int, ...], type_: str, num_bytes: int) -> None:
        self.num_parameters += math.prod(shape)
        if len(shape) > 1:
            self._matrix_bytes[type_] = self._matrix_bytes.get(type_, 0) + num_bytes

    def _adds_nothing(self, tensor: StoredTensor) -> bool:
        """A bias of zeros, which some writers of matrices in groups give every layer."""
        is_bias = self._grouping is not None and tensor.name.endswith(".bias")
        return is_bias and not any(tensor.data)

    def _take(
        self, name: str, shape: tuple[int, ...], types: Collection[str] = _STORED_TYPES
    ) -> StoredTensor:
        tensor = self._find(name)
        if tensor.type not in types:
            raise ConfigError(
                f"{self.path}: tensor {name} has type {tensor.type};"
                f" supported are {', '.join(types)}",
                hint="use a file in one of the supported types",
            )
        if tensor.shape != shape:
            raise ConfigError(
                f"{self.path}: tensor {name} has shape {list(tensor.shape)};"
                f" {list(shape)} is needed"
            )
        self._taken[name] = tensor
        self._bytes_taken += tensor.data.nbytes
        if self._on_progress is not None:
            self._on_progress(self._bytes_taken, self._bytes_total)
        return tensor

    def _find(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ConfigError(
                f"{self.path}: tensor {name} is missing",
                hint="the file is incomplete or of another architecture",
            ) from None


def _sampled(data: memoryview) -> Iterable[memoryview]:
    if data.nbytes <= _SAMPLED_PAGES * _PAGE_BYTES:
        return [data]
    last = data.nbytes - _PAGE_BYTES
    starts = [last * i // (_SAMPLED_PAGES - 1) for i in range(_SAMPLED_PAGES)]
    return [data[start : start + _PAGE_BYTES] for start in starts]
