"""`Backend` over the C++ extension: record a forward pass once, then run every step in one call.

The arithmetic is fixed: each output of `linear` is one chain of fused multiply-adds over the
inputs in order, with weights dequantised exactly as their format says, and attention walks the
blocks of a sequence in order. So results depend neither on the rows computed together nor on
threads or instruction set. `activations` allows three faster ways, each as independent of
rows and threads:

- "int8": inputs of quantised weights are rounded in blocks of 32 to 255 levels; the products of a
  block add up as integers and the blocks in one chain, so every instruction set gives the same
  bits. (The scheme of llama.cpp's Q8_0 and Q8_1 activations.)
- "int12": inputs of weights of four bits are rounded to 4,065 levels for a row, and the weights'
  scales to whole numbers for an output, so that all products of a row and an output add up as
  integers (docs/adr/0032). Those of other quantised weights are as in "int8".
- "bf16": inputs of BF16 weights are rounded to bf16, and each 32 of them add up in two chains, of
  the even and of the odd inputs, as the tiles of AMX do it; every instruction set gives the same
  bits but for AVX-512 without AMX, whose dot product of bf16 has bits of its own.

`attention="bf16"` rounds queries and the weights of values to bf16 and multiplies as AMX's tiles
do, which every instruction set follows with the same bits (docs/adr/0029). What is "auto" depends
on the instruction set (`core/config/arithmetic.py`); machines of several kinds that shall give the
same bits are told both.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from headrace.core.base.errors import ConfigError, DeviceError
from headrace.core.base.plan import BlockCopy, TokenLogprob
from headrace.core.config.arithmetic import choose_arithmetic
from headrace.ops.interface import (
    NO_TOKEN,
    AttentionSpec,
    Forward,
    KvFile,
    KvLayout,
    Rope,
    RowRequest,
    RowResult,
    StepBatch,
    TensorView,
)
from headrace.ops.native import _native

_BLOCK_TOKENS = 16  # of the kernels' KV layout


def default_threads() -> int:
    """CPUs this process may use: its affinity mask, capped by its control group's quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, -(-int(quota) // int(period))))


class _Faults:
    """Faults of the extension as errors of the tree. No generator: it is entered twice between two
    steps, where nothing of it is in a cache.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _native.Fault):
            raise DeviceError(str(error)) from None


_faults = _Faults()


class NativeBackend:
    """Computes on the CPU with `threads` threads (0 = all CPUs of this process).

    `isa` is one of `usable_isas()` or "auto". `activations` is the least precision that inputs of
    linear layers may be rounded to: "f32" rounds nothing, "bf16" those of BF16 weights, "int8"
    and "int12" those of quantised weights, and those of BF16 weights where `isa` has products of
    bf16; `attention` multiplies in "f32" or "bf16". Raises ConfigError for what this machine cannot
    do.
    """

    name = "native"
    batch_invariant = True

    def __init__(
        self,
        threads: int = 0,
        isa: str = "auto",
        activations: str = "auto",
        attention: str = "auto",
    ) -> None:
        usable = _native.usable_isas()
        if isa != "auto" and isa not in usable:
            raise ConfigError("unusable instruction set", isa=isa, usable=", ".join(usable))
        if activations not in ("auto", "f32", "bf16", "int12", "int8"):
            raise ConfigError(
                "activations must be auto, f32, bf16, int12 or int8", activations=activations
            )
        if attention not in ("auto", "f32", "bf16"):
            raise ConfigError("attention must be auto, f32 or bf16", attention=attention)
        if not 0 <= threads <= 1024:
            raise ConfigError("threads must be in 0..1024", threads=threads)
        self.isa = _native.fastest_isa() if isa == "auto" else isa
        self.bf16_products = _native.bf16_products(self.isa)  # "fma", "dot" or "tiles"
        chosen = choose_arithmetic("native", self.isa, activations, attention)
        activations, attention = chosen.activations, chosen.attention
        may_round = activations != "f32"
        self.bf16 = activations == "bf16" or (may_round and self.bf16_products != "fma")
        self.int12 = activations == "int12"
        self.int8 = activations in ("int8", "int12")
        self.attention_bf16 = attention == "bf16"
        self._pool = _native.Pool(threads or default_threads())
        self._weight_bytes = 0

    @property
    def arithmetic(self) -> str:
        """Neither threads nor the instruction set change a bit, but for VDPBF16PS."""
        words = "native" + (" int12" if self.int12 else " int8" * self.int8)
        if self.bf16:
            words += " bf16-dot" if self.bf16_products == "dot" else " bf16"
        return words + " attention-bf16" * self.attention_bf16

    @property
    def threads(self) -> int:
        return self._pool.threads

    def load_weight(self, view: TensorView) -> _native.Weight:
        """Copy the weight into panels of 16 outputs, in its own type."""
        with _faults:
            weight = _native.Weight(
                self._pool, view.type.value, view.rows, view.cols, view.data, view.order
            )
        self._weight_bytes += weight.bytes
        return weight

    def weight_bytes(self) -> int:
        return self._weight_bytes

    def compile(
        self,
        forward: Forward[int, _native.Weight],
        kv: KvLayout,
        max_tokens: int,
        kv_file: KvFile | None = None,
    ) -> "NativeProgram":
        if kv.block_size != _BLOCK_TOKENS:
            raise DeviceError("KV blocks have 16 tokens", block_size=kv.block_size)
        with _faults:
            program = _native.Program(
                self._pool,
                self.isa,
                self.bf16,
                self.int8,
                self.int12,
                self.attention_bf16,
                kv.num_layers,
                kv.num_kv_heads,
                kv.head_dim,
                kv.num_blocks,
                kv.dtype.value,
                max_tokens,
                *(() if kv_file is None else kv_file),
            )
            program.seal(forward(_Recorder(program)))
        return NativeProgram(program)


class _Recorder:
    """`Ops` whose handles are the program's registers."""

    def __init__(self, program: _native.Program) -> None:
        self._program = program

    def embed(self, table: _native.Weight) -> int:
        return self._program.embed(table)

    def rms_norm(self, x: int, weight: _native.Weight, eps: float) -> int:
        return self._program.rms_norm(x, weight, eps)

    def linear(
        self,
        x: int,
        weights: Sequence[_native.Weight],
        biases: Sequence[_native.Weight | None] = (),
    ) -> int:
        return self._program.linear(x, tuple(weights), tuple(biases))

    def add(self, x: int, y: int) -> int:
        return self._program.add(x, y)

    def silu_mul(self, gate_up: int) -> int:
        return self._program.silu_mul(gate_up)

    def attention(self, qkv: int, layer: int, spec: AttentionSpec, rope: Rope) -> int:
        return self._program.attention(
            qkv,
            layer,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.scale,
            rope.inv_freq,
            rope.interleaved,
        )

    def select_logit_rows(self, x: int) -> int:
        return self._program.select_logit_rows(x)


class NativeProgram:
    """`Program` in C++. The interpreter lock is free while a step runs."""

    def __init__(self, program: _native.Program) -> None:
        self._program = program

    @property
    def activation_bytes(self) -> int:
        """Most bytes that activations can occupy; pages no step has needed yet cost nothing."""
        return self._program.activation_bytes

    def run(self, batch: StepBatch) -> None:
        with _faults:
            self._program.run(
                batch.tokens,
                batch.token_starts,
                batch.positions,
                batch.block_tables,
                batch.logit_rows,
            )

    def finish_rows(self, requests: Sequence[RowRequest]) -> list[RowResult]:
        with _faults:
            rows = self._program.finish_rows([_row(request) for request in requests])
        return [_finished(request, row) for request, row in zip(requests, rows, strict=True)]

    def logits(self) -> list[list[float]]:
        return self._program.logits()

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        with _faults:
            self._program.copy_blocks([(copy.src, copy.dst, copy.num_tokens) for copy in copies])

    def ready_blocks(self) -> bool:
        return self._program.ready_blocks()


def _finished(request: RowRequest, row: "_native.Finished") -> RowResult:
    if isinstance(row, str):
        return RowResult(NO_TOKEN, None, row)
    return RowResult(row[0], None if request.num_top is None else TokenLogprob(*row))


def _row(request: RowRequest) -> "_native.Row":
    spec = request.sample
    if spec is None:
        return None, request.target, request.num_top
    params = spec.params
    choice = (
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.seed,
        params.choice,
        spec.position,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        params.logit_bias,
        spec.banned,
        spec.prompt_tokens,
        spec.output_tokens,
    )
    return choice, request.target, request.num_top


def usable_isas() -> list[str]:
    """Instruction sets that are compiled in and that this CPU has, slowest first."""
    return _native.usable_isas()
