"""The port between models and backends.

A model is written once as `forward(ops) -> logits handle`: a straight line of calls on `Ops`. The
tokens, positions and block tables of the current step are the backend's business, so a backend may
run each call at once (torch) or record the line once and later run it natively for any batch
(native).

Shapes use T = tokens in the step (over all sequences), L = rows that need logits, H / Hkv = query /
KV heads, D = head size. Activations are float32; every backend may compute inside as it states,
never less exactly than its `Precision` says.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from headrace.core.base.plan import BlockCopy, SampleSpec, TokenLogprob
from headrace.core.base.types import BlockId

T = TypeVar("T")  # activation handle: a tensor, or a register of a recorded program
W = TypeVar("W")  # weight handle
W_in = TypeVar("W_in", contravariant=True)  # weight handle that is only taken
W_out = TypeVar("W_out", covariant=True)  # weight handle that a model holds


class WeightType(StrEnum):
    """Storage types of weights, as files hold them (GGUF block types keep their own layout).

    Q4_G32 and Q4_G128 are what AWQ and GPTQ matrices become. A block of 32 or 128 values is a
    float16 scale, a float16 offset that is a whole number, and for every 32 values sixteen bytes of
    nibbles q as in Q4_1. A value is scale * (q + offset), exactly a float32.
    """

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q4_G32 = "q4_g32"
    Q4_G128 = "q4_g128"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"


class TensorView(msgspec.Struct, frozen=True):
    """A weight as it lies in a memory-mapped file: row-major [rows, cols]; a vector is [1, cols].

    `linear` computes x @ weight.T, so rows are outputs and cols are inputs. Quantised rows consist
    of blocks along cols, of 32 values, of 128 or of 256 in the K types, so cols is a multiple of
    that.

    With an `order`, column j belongs to input order[j]: for matrices whose inputs are grouped in
    another order than they come in. Only `linear` takes such a weight.
    """

    name: str
    type: WeightType
    rows: int
    cols: int
    data: memoryview  # format "B", contiguous, exactly the tensor's bytes
    order: Sequence[int] = ()


class Rope(msgspec.Struct, frozen=True):
    """Rotary position embedding. Pair i of a head is rotated by position * inv_freq[i].

    `interleaved`: pair i is (2i, 2i + 1), as in GGUF llama files; otherwise it is (i, i + D / 2),
    as in safetensors files.
    """

    inv_freq: tuple[float, ...]  # D / 2 values, scaling for long context already applied
    interleaved: bool


class AttentionSpec(msgspec.Struct, frozen=True):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


class KvType(StrEnum):
    """How the KV pool stores a token's key or value of one head, rounded to nearest even.

    INT8 is scale * q with q in -127..127 and a float32 scale for each of these vectors: its
    greatest magnitude / 127, or 0 where that is below 1e-30. FP8 is E4M3 (OCP "fn") without a
    scale: finite values beyond 448 become 448. What is no finite number reads as NaN: in FP8 that
    element, in INT8 the whole vector.
    """

    BF16 = "bf16"
    INT8 = "int8"
    FP8 = "fp8"

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one key or value, its scale included."""
        match self:
            case KvType.BF16:
                return 2 * head_dim
            case KvType.INT8:
                return head_dim + 4
            case KvType.FP8:
                return head_dim


class KvLayout(msgspec.Struct, frozen=True):
    """The KV pool. Bytes of a block are opaque outside the backend; it costs `block_bytes`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int = 16
    dtype: KvType = KvType.BF16

    @property
    def block_bytes(self) -> int:
        num_vectors = 2 * self.num_layers * self.num_kv_heads * self.block_size
        return num_vectors * self.dtype.vector_bytes(self.head_dim)


class KvFile(NamedTuple):
    """Shared memory that holds a KV pool of `num_blocks * block_bytes` bytes; the fd stays the
    caller's.
    """

    fd: int
    offset: int  # bytes, whole pages


class Ops(Protocol[T, W_in]):
    """Operations on the current step's rows. All results are new handles; inputs stay valid."""

    def embed(self, table: W_in) -> T:
        """Rows of `table` for the step's token ids: [T, cols]."""
        ...

    def rms_norm(self, x: T, weight: W_in, eps: float) -> T:
        """x / sqrt(mean(x²) + eps) * weight, row by row."""
        ...

    def linear(self, x: T, weights: Sequence[W_in], biases: Sequence[W_in | None] = ()) -> T:
        """x @ concat(weights).T + concat(biases). Weights may differ in type."""
        ...

    def add(self, x: T, y: T) -> T: ...

    def silu_mul(self, gate_up: T) -> T:
        """silu(gate) * up, where gate is the first half of each row and up the second."""
        ...

    def attention(self, qkv: T, layer: int, spec: AttentionSpec, rope: Rope) -> T:
        """Rotate q and k, write k and v to the KV cache of `layer` as its type stores them, then
        attend causally over the cache.

        qkv rows are [q: H * D | k: Hkv * D | v: Hkv * D]; the result rows are [H * D]. A query at
        position p of its sequence sees positions 0..p, through the sequence's block table.
        """
        ...

    def select_logit_rows(self, x: T) -> T:
        """The rows whose logits the step asks for: [L, cols], in step order."""
        ...


class StepBatch(msgspec.Struct, frozen=True):
    """A ragged batch. Sequence i owns tokens[token_starts[i] : token_starts[i + 1]], at positions
    from positions[i] on.
    """

    tokens: Sequence[int]
    token_starts: Sequence[int]  # num_seqs + 1 values
    # position of each sequence's first token in this step = its KV length before the step
    positions: Sequence[int]
    # one for each sequence; covers its positions after the step
    block_tables: Sequence[Sequence[BlockId]]
    logit_rows: Sequence[int]  # indices into tokens, increasing


class RowRequest(msgspec.Struct, frozen=True):
    """What is wanted of one logits row: a sampled token, or the log probability of a known one."""

    sample: SampleSpec | None
    target: int | None = None  # known next token (prompt log probabilities)
    num_top: int | None = None  # None = no log probabilities, 0 = only of the token itself


NO_TOKEN = -1  # of a row with a fault


class RowResult(msgspec.Struct, frozen=True):
    token: int
    logprob: TokenLogprob | None
    fault: str = ""  # of this row alone: why there is neither


class Program(Protocol):
    """A model compiled by a backend, with its KV pool. Not thread-safe: one step at a time."""

    def run(self, batch: StepBatch) -> None:
        """One forward pass; logits of `batch.logit_rows` stay in the backend until the next run."""
        ...

    def finish_rows(self, requests: Sequence[RowRequest]) -> list[RowResult]:
        """Sample or score the logits rows of the last run, one request for each, in order."""
        ...

    def logits(self) -> list[list[float]]:
        """The logits of the last run [L, vocab] (tests and perplexity; not the serving path)."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...

    def ready_blocks(self) -> bool:
        """Ready memory of blocks that no step has used yet, for some milliseconds; whether there is
        more to do. What is not readied costs the step time that uses it first.
        """
        ...


class Backend(Protocol[T, W]):
    """Where weights live and programs run."""

    name: str
    batch_invariant: bool

    @property
    def arithmetic(self) -> str:
        """Differs wherever the bits of a result may."""
        ...

    def load_weight(self, view: TensorView) -> W:
        """Take a weight in, in whatever form the backend computes with. The view need not outlive
        the call.
        """
        ...

    def weight_bytes(self) -> int:
        """Bytes that all weights loaded so far occupy."""
        ...

    def compile(
        self,
        forward: "Forward[T, W]",
        kv: KvLayout,
        max_tokens: int,
        kv_file: KvFile | None = None,
    ) -> Program:
        """Prepare `forward` for steps of up to `max_tokens` tokens over a new KV pool. It is in
        `kv_file`, block after block, where one is given. DeviceError if it does not fit, or cannot
        be there.
        """
        ...


Forward = Callable[[Ops[T, W]], T]


class Model(Protocol[T, W_out]):
    """What the executor needs of a loaded architecture."""

    vocab_size: int
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    digest: str

    def forward(self, ops: Ops[T, W_out]) -> T: ...
