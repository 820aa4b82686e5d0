"""The byte ledger: what a worker's memory goes to, and how large a KV pool fits beside the rest.

Decides the size of the KV pool, and what to say when none fits; refuses to measure anything.
"""

from dataclasses import dataclass, replace

from headrace.core.base.errors import ConfigError
from headrace.core.config.units import format_bytes, size_text

AUTO_KV_SHARE = 0.25
"""Most of the available memory that a pool of unstated size takes: a laptop has other work to do,
and a machine that serves only can state more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLedger:
    """Bytes by purpose. `available` is all that this process may have, what it already holds
    included.
    """

    weights: int = 0
    activations: int = 0
    kv: int = 0
    staging: int = 0  # buffers for KV on its way to another place
    other: int = 0  # the program itself
    available: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.kv + self.staging + self.other

    @property
    def free(self) -> int:
        """What is left; negative when it does not fit."""
        return self.available - self.total

    @property
    def fits(self) -> bool:
        return self.total <= self.available


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """A KV pool that fits, and what fits into it."""

    num_blocks: int
    block_size: int  # tokens
    block_bytes: int
    max_model_len: int
    reason: str  # what decided its size
    ledger: ByteLedger  # the pool included

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def memory_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_full_seqs(self) -> int:
        """Sequences of max_model_len tokens that fit at once."""
        return self.num_seqs_of(self.max_model_len)

    def num_seqs_of(self, num_tokens: int) -> int:
        """Sequences of `num_tokens` tokens, with no block shared, that fit at once."""
        return self.num_blocks // blocks_for(num_tokens, self.block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def plan_kv(
    ledger: ByteLedger,
    *,
    asked_bytes: int,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_running_seqs: int,
    step_tokens: int,
) -> KvPlan:
    """The pool that stands in `ledger.kv`'s place: `asked_bytes`, or where that is 0 as much as
    `max_running_seqs` sequences can use, at most AUTO_KV_SHARE of the available memory, at least
    one whole sequence. `ledger.activations` are those of a step of `step_tokens`.

    ConfigError, with what would fit, where one whole sequence does not.
    """
    ledger = replace(ledger, kv=0)
    seq_blocks = blocks_for(max_model_len, block_size)
    room_blocks = max(0, ledger.free) // block_bytes
    if asked_bytes:
        num_blocks = asked_bytes // block_bytes
        reason = "as asked"
        if num_blocks > room_blocks:
            error = _too_large(
                ledger, asked_bytes, room_blocks, seq_blocks, block_bytes, block_size
            )
            raise _or_smaller_steps(error, ledger, asked_bytes, step_tokens)
        if num_blocks < seq_blocks:
            raise _too_small(asked_bytes, num_blocks, seq_blocks, block_bytes, block_size)
    else:
        if room_blocks < seq_blocks:
            error = _no_room(
                ledger, max_model_len, room_blocks, seq_blocks, block_bytes, block_size
            )
            raise _or_smaller_steps(error, ledger, seq_blocks * block_bytes, step_tokens)
        share_blocks = int(ledger.available * AUTO_KV_SHARE) // block_bytes
        used_blocks = max_running_seqs * seq_blocks
        num_blocks, reason = min(
            (used_blocks, f"all that {max_running_seqs} sequences of {max_model_len} tokens use"),
            (share_blocks, f"{AUTO_KV_SHARE:.0%} of {format_bytes(ledger.available)} available"),
            (room_blocks, "all memory beside weights and activations"),
        )
        if num_blocks < seq_blocks:
            num_blocks, reason = seq_blocks, f"one sequence of {max_model_len} tokens"
    return KvPlan(
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=block_bytes,
        max_model_len=max_model_len,
        reason=reason,
        ledger=replace(ledger, kv=num_blocks * block_bytes),
    )


def _no_room(
    ledger: ByteLedger,
    max_model_len: int,
    room_blocks: int,
    seq_blocks: int,
    block_bytes: int,
    block_size: int,
) -> ConfigError:
    need = format_bytes(seq_blocks * block_bytes)
    message = (
        f"KV for one sequence of {max_model_len} tokens needs {need}; {_rest(ledger)} leave"
        f" {format_bytes(max(0, ledger.free))} of {format_bytes(ledger.available)} available"
    )
    if room_blocks == 0:
        short = seq_blocks * block_bytes - ledger.free
        return ConfigError(message, hint=f"free {format_bytes(short)}, or serve a smaller model")
    return ConfigError(message, hint=f"--max-model-len {room_blocks * block_size} fits")


def _or_smaller_steps(
    error: ConfigError, ledger: ByteLedger, kv_bytes: int, step_tokens: int
) -> ConfigError:
    """The error, with steps beside which the KV would fit where steps take most of the memory."""
    others = ledger.total - ledger.activations + kv_bytes
    if ledger.activations <= others:
        return error
    fitting = (ledger.available - others) * step_tokens // ledger.activations
    if fitting < 1:
        return error
    return ConfigError(error.message, hint=f"--step-tokens {fitting} fits")


def _too_large(
    ledger: ByteLedger,
    asked_bytes: int,
    room_blocks: int,
    seq_blocks: int,
    block_bytes: int,
    block_size: int,
) -> ConfigError:
    # Any size of that many whole blocks, or nearly as many, will do; a round one reads best.
    least_blocks = min(room_blocks, max(seq_blocks, room_blocks - room_blocks // 100))
    size = size_text(least_blocks * block_bytes, (room_blocks + 1) * block_bytes - 1)
    hint = f"--kv-memory {size} fits"
    if room_blocks < seq_blocks:
        hint += f" with --max-model-len {room_blocks * block_size}"
    return ConfigError(
        f"a KV pool of {format_bytes(asked_bytes)} does not fit: {_rest(ledger)} leave"
        f" {format_bytes(max(0, ledger.free))} of {format_bytes(ledger.available)} available",
        hint=hint if room_blocks else "serve a smaller model, or free some memory",
    )


def _too_small(
    asked_bytes: int, num_blocks: int, seq_blocks: int, block_bytes: int, block_size: int
) -> ConfigError:
    least_bytes = seq_blocks * block_bytes
    hint = f"--kv-memory {size_text(least_bytes, least_bytes + least_bytes // 100)} is enough"
    if num_blocks:
        hint += f", or --max-model-len {num_blocks * block_size}"
    return ConfigError(
        f"a KV pool of {format_bytes(asked_bytes)} holds {num_blocks * block_size} tokens,"
        f" less than one whole sequence of {seq_blocks * block_size}",
        hint=hint,
    )


def _rest(ledger: ByteLedger) -> str:
    return (
        f"weights ({format_bytes(ledger.weights)}), activations and other buffers"
        f" ({format_bytes(ledger.total - ledger.weights)})"
    )
