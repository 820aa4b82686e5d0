"""What this machine does at most, measured on the spot, and the share of it that work reached.

Decides what a limit is; refuses to know which work is compared with it.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.ops.native import _native

MIN_READ_BYTES, MAX_READ_BYTES = 256 << 20, 2 << 30
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of all threads together, by the instructions that the kernels use; the best of several runs.

    A multiply-add counts as two operations. 0 = there is no such product here.
    """

    isa: str
    num_threads: int
    read_bytes_per_s: float  # of memory, far beyond the caches
    read_by_one_thread_bytes_per_s: float
    f32_ops_per_s: float
    int4_ops_per_s: float  # 4-bit weights times 8-bit inputs
    int8_ops_per_s: float  # 8-bit weights times 8-bit inputs
    bf16_ops_per_s: float

    def ops_per_s(self, kind: str) -> float:
        """Of the products `kind`: f32, int4, int8 or bf16."""
        return float(getattr(self, f"{kind}_ops_per_s"))


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be done whatever computes it: the bytes that have to be read once, and the
    operations by kind of product.
    """

    weight_bytes: int
    kv_bytes: int
    operations: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def num_operations(self) -> int:
        return sum(self.operations.values())


class Share(msgspec.Struct, frozen=True):
    """The part of the binding limit that was reached; above 1 where data came from a cache."""

    share: float | None  # None = nothing is counted as work
    bound: str  # "memory" or "arithmetic": what would take longer at its limit


def share_of(work: Work, seconds: float, limits: Limits) -> Share:
    """The roofline: nothing takes less time than reading its bytes, or than its operations."""
    reading_s = work.num_bytes / limits.read_bytes_per_s
    computing_s = sum(
        count / limits.ops_per_s(kind) for kind, count in work.operations.items() if count
    )
    if not reading_s and not computing_s:
        return Share(None, "")
    if reading_s >= computing_s:
        return Share(reading_s / seconds, "memory")
    return Share(computing_s / seconds, "arithmetic")


def measure_limits(isa: str, num_threads: int, *, seconds: float = 3.0) -> Limits:
    """In about `seconds`, and with up to a quarter of a gigabyte or four times the last cache."""
    all_threads, one = _native.Pool(num_threads), _native.Pool(1)
    num_bytes = min(max(MIN_READ_BYTES, 4 * last_cache_bytes()), MAX_READ_BYTES)
    part_s = seconds / 6
    return Limits(
        isa=isa,
        num_threads=num_threads,
        read_bytes_per_s=_native.read_limit(all_threads, isa, num_bytes, part_s),
        read_by_one_thread_bytes_per_s=_native.read_limit(one, isa, num_bytes, part_s),
        f32_ops_per_s=_native.product_limit(all_threads, isa, "f32", part_s),
        int4_ops_per_s=_native.product_limit(all_threads, isa, "int4", part_s),
        int8_ops_per_s=_native.product_limit(all_threads, isa, "int8", part_s),
        bf16_ops_per_s=_native.product_limit(all_threads, isa, "bf16", part_s),
    )


def last_cache_bytes(folder: Path = _CACHES) -> int:
    """The largest cache of the first CPU; 0 where the system does not say."""
    sizes = [0]
    for path in folder.glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KMG":
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes)
