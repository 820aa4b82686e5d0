"""The kernels of a model: what its steps and its single operations take, beside what they could.

Decides what is timed and against which limit it is held; refuses to know how it is computed.
"""

from statistics import median

import msgspec

from headrace.bench.cells import BLOCK_TOKENS, STEPS, Cell
from headrace.bench.census import Census, KnowingBackend
from headrace.bench.limits import Limits, Work, measure_limits, share_of
from headrace.bench.operations import Prepared, fill, operations_of, running
from headrace.bench.timing import Allowance
from headrace.live.memory import available_bytes
from headrace.models.hub import resolve_model
from headrace.models.load import LoadedModel, load_model
from headrace.ops.interface import KvLayout
from headrace.ops.native.backend import NativeBackend

_EXACT = "f32"
# Parts of the time that a run may take.
_LIMITS, _STEPS, _OPERATIONS = 0.1, 0.7, 0.2
_MAX_KV_SHARE = 0.5  # of the memory that is there


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """A step or an operation, timed. Rates are those of the median run."""

    name: str
    activations: str  # what inputs of quantised weights are rounded to
    num_runs: int
    median_ms: float
    fastest_ms: float
    weight_bytes: int
    kv_bytes: int
    num_operations: int
    gbytes_per_s: float
    gflop_per_s: float
    share: float | None  # of the limit that binds; none where what it moves is in the caches
    bound: str  # "memory", "arithmetic", or "" where no share is known

    @staticmethod
    def of(
        name: str, activations: str, work: Work, times_s: list[float], limits: Limits
    ) -> "Timed":
        """Of at least one time."""
        taken_s = median(times_s)
        share = share_of(work, taken_s, limits)
        return Timed(
            name=name,
            activations=activations,
            num_runs=len(times_s),
            median_ms=1e3 * taken_s,
            fastest_ms=1e3 * min(times_s),
            weight_bytes=work.weight_bytes,
            kv_bytes=work.kv_bytes,
            num_operations=work.num_operations,
            gbytes_per_s=work.num_bytes / taken_s / 1e9,
            gflop_per_s=work.num_operations / taken_s / 1e9,
            share=share.share,
            bound=share.bound,
        )


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    weight_types: str
    limits: Limits
    steps: list[Timed]
    operations: list[Timed]
    left_out: list[str]  # what was not measured, and why


class _Bench:
    """One model in memory, and what has been measured of it."""

    def __init__(self, loaded: LoadedModel, book: KnowingBackend, limits: Limits) -> None:
        self.model = loaded.model
        self.limits = limits
        self.census = Census(book.weights)
        self.model.forward(self.census)
        self.left_out: list[str] = []
        self.cells = [cell for cell in STEPS if self.has_room(cell)]
        self.operations = [
            operation
            for operation in operations_of(self.census, self.layout, self.model.vocab_size)
            if self.has_room(operation.cell)
        ]

    def layout(self, num_blocks: int) -> KvLayout:
        model = self.model
        return KvLayout(model.num_layers, model.num_kv_heads, model.head_dim, num_blocks)

    def has_room(self, cell: Cell) -> bool:
        """Whether the model and this machine can take the cell; says so where they cannot."""
        if cell.context > self.model.max_model_len:
            self.left_out.append(f"{cell.name}: longer than the model's context")
            return False
        if cell.num_blocks * self.layout(1).block_bytes > _MAX_KV_SHARE * available_bytes():
            self.left_out.append(f"{cell.name}: its KV does not fit into memory")
            return False
        return True

    def time_steps(self, backend: NativeBackend, activations: str, time: Allowance) -> list[Timed]:
        if not self.cells:
            return []
        num_blocks = max(cell.num_blocks for cell in self.cells)
        num_tokens = max(BLOCK_TOKENS, *(cell.num_step_tokens for cell in self.cells))
        program = backend.compile(self.model.forward, self.layout(num_blocks), num_tokens)
        fill(program, num_blocks)
        rows = []
        for cell in self.cells:
            prepared = Prepared(running(program, cell), 1, self.census.work(cell, backend))
            rows += self.timed(cell.name, activations, prepared, time)
        return rows

    def time_operations(
        self, backend: NativeBackend, activations: str, time: Allowance
    ) -> list[Timed]:
        rows = []
        for operation in self.operations:
            if operation.is_rounded or activations == _EXACT:
                rows += self.timed(operation.name, activations, operation.prepare(backend), time)
        return rows

    def timed(
        self, name: str, activations: str, prepared: Prepared, time: Allowance
    ) -> list[Timed]:
        times_s = time.times_s(prepared.run)
        if not times_s:
            self.left_out.append(f"{name}, {activations}: the time was over; raise --seconds")
            return []
        times_s = [taken_s / prepared.count for taken_s in times_s]
        return [Timed.of(name, activations, prepared.work, times_s, self.limits)]


def measure_kernels(
    model: str = "", *, threads: int = 0, isa: str = "auto", seconds: float = 30.0
) -> KernelReport:
    """Of a model file, folder or hub id ("" = the default model), in about `seconds` after loading.
    ConfigError as for loading it.
    """
    first = NativeBackend(threads, isa, _EXACT)
    rounded = ("int12", "int8") if first.bf16_products == "tiles" else ("int8",)
    backends = {_EXACT: first, **{name: NativeBackend(threads, isa, name) for name in rounded}}
    book = KnowingBackend(first)
    loaded = load_model(resolve_model(model), book)
    try:
        limits = measure_limits(first.isa, first.threads, seconds=_LIMITS * seconds)
        bench = _Bench(loaded, book, limits)
        time = Allowance(_STEPS * seconds, len(bench.cells) * len(backends))
        steps = [t for name, each in backends.items() for t in bench.time_steps(each, name, time)]
        num_rounded = sum(operation.is_rounded for operation in bench.operations)
        time = Allowance(_OPERATIONS * seconds, len(bench.operations) + len(rounded) * num_rounded)
        operations = [
            t for name, each in backends.items() for t in bench.time_operations(each, name, time)
        ]
        return KernelReport(
            model=loaded.description.name,
            weight_types=loaded.description.weight_types,
            limits=limits,
            steps=steps,
            operations=operations,
            left_out=bench.left_out,
        )
    finally:
        loaded.close()
