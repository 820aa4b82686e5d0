"""The C++ extension. See csrc/module.cpp."""

from collections.abc import Iterable, Sequence

from _typeshed import ReadableBuffer, WriteableBuffer

Choice = tuple[
    float,  # temperature
    float,  # top_p
    int,  # top_k
    float,  # min_p
    int,  # seed
    int,  # choice
    int,  # position
    float,  # presence_penalty
    float,  # frequency_penalty
    float,  # repetition_penalty
    Sequence[tuple[int, float]],  # logit_bias
    Sequence[int],  # banned
    Sequence[int],  # prompt_tokens
    Sequence[int],  # output_tokens
]
Row = tuple[Choice | None, int | None, int | None]  # choice, target, num_top
ScoredToken = tuple[int, float, int, tuple[tuple[int, float], ...]]  # token, logprob, rank, top
Finished = ScoredToken | str  # or why there is none

class Fault(Exception): ...

def usable_isas() -> list[str]: ...
def fastest_isa() -> str: ...
def amx_refusal() -> str: ...  # why AMX is not usable though the CPU has it, or nothing
def bf16_products(isa: str) -> str: ...  # "fma", "dot" or "tiles"
def read_limit(pool: Pool, isa: str, num_bytes: int, seconds: float) -> float: ...
def product_limit(pool: Pool, isa: str, kind: str, seconds: float) -> float: ...
def large_arenas() -> bool:
    """From now on, small objects of Python lie in large pages. Whether that is new."""

def large_heap() -> bool:
    """The same for what else this thread takes. False where the C library or the system cannot."""

def can_name_blocks() -> bool: ...  # else `block_names` must not be called
def block_names(
    parent: bytes, tokens: Sequence[int], first: int, block_size: int
) -> tuple[list[bytes], bytes]: ...
def copy_range(
    to: WriteableBuffer,
    to_offset: int,
    source: ReadableBuffer,
    from_offset: int,
    num_bytes: int,
) -> None: ...
def philox(seed: int, choice: int, position: int) -> int: ...
def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...

class Replicas:
    """As core/router/replicas.py has them. Names count by their first 16 bytes."""

    def add(self, bit: int, names: Iterable[bytes]) -> int: ...
    def remove(self, bit: int, names: Iterable[bytes]) -> int: ...
    def get(self, name: bytes) -> int: ...
    def discard(self, part: int, bits: int) -> int: ...
    def items(self) -> list[tuple[bytes, int]]: ...

class Ghash:
    """GHASH of NIST SP 800-38D over bytes that are authenticated and not encrypted."""

    def __init__(self, subkey: bytes) -> None: ...
    @staticmethod
    def can_run() -> bool: ...
    def of(self, data: ReadableBuffer) -> bytes: ...
    def receive(self, fd: int, into: WriteableBuffer, patience_ms: int) -> bytes:
        """Of what fills `into` from a socket."""

class Pool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

def grouped_blocks(
    pool: Pool,
    type: str,
    is_awq: bool,
    bits: int,
    rows: int,
    cols: int,
    group: int,
    zero_offset: int,
    weights: memoryview,
    zeros: memoryview,
    scales: memoryview,
    bf16_scales: bool,
    order: Sequence[int],
) -> bytes: ...

class Weight:
    def __init__(
        self,
        pool: Pool,
        type: str,
        rows: int,
        cols: int,
        data: memoryview,
        order: Sequence[int] = (),
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class Program:
    def __init__(
        self,
        pool: Pool,
        isa: str,
        bf16: bool,
        int8: bool,
        int12: bool,
        attention: bool,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        kv: str,
        max_tokens: int,
    ) -> None: ...
    def embed(self, table: Weight) -> int: ...
    def rms_norm(self, x: int, weight: Weight, eps: float) -> int: ...
    def linear(
        self, x: int, weights: tuple[Weight, ...], biases: tuple[Weight | None, ...]
    ) -> int: ...
    def add(self, x: int, y: int) -> int: ...
    def silu_mul(self, gate_up: int) -> int: ...
    def attention(
        self,
        qkv: int,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        inv_freq: Sequence[float],
        interleaved: bool,
    ) -> int: ...
    def select_logit_rows(self, x: int) -> int: ...
    def seal(self, logits: int) -> None: ...
    def run(
        self,
        tokens: Sequence[int],
        token_starts: Sequence[int],
        positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        logit_rows: Sequence[int],
    ) -> None: ...
    def finish_rows(self, requests: Sequence[Row]) -> list[Finished]: ...
    def logits(self) -> list[list[float]]: ...
    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None: ...
    def ready_blocks(self) -> bool: ...
    @property
    def activation_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
