"""KV events of engines on the wire, as vLLM publishes them and SGLang after it: batches in msgpack.

Decides what of a batch is believed; refuses to know what a block's hash means.

A batch is {ts, events, data_parallel_rank}, an event is BlockStored, BlockRemoved or
AllBlocksCleared. Either is a map of its fields or, in other versions, an array of them in order.
Fields at the end may be missing, and others may follow.
"""

from typing import Annotated, Any, Final, TypeAlias

import msgspec

Hash: TypeAlias = int | bytes  # of a block, by the engine's own rule

# What is read on an event loop must not hold it for long. An engine's batch is of one step: some
# hundred events at most, and a few bytes for each token.
MAX_BATCH_BYTES: Final = 8 << 20
MAX_EVENTS: Final = 1 << 16  # of a batch
ON_DEVICE: Final = frozenset({None, "GPU"})  # media from which a hit costs no copy


class Unreadable(Exception):
    """This is no batch of KV events."""


class _StoredFields(msgspec.Struct, frozen=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # what but tokens makes a block, for each
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedFields(msgspec.Struct, frozen=True):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class Stored(_StoredFields, frozen=True, tag="BlockStored"):
    pass


class Removed(_RemovedFields, frozen=True, tag="BlockRemoved"):
    pass


class Cleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    pass


class _StoredArray(_StoredFields, frozen=True, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(_RemovedFields, frozen=True, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(msgspec.Struct, frozen=True, tag="AllBlocksCleared", array_like=True):
    pass


class _BatchFields(msgspec.Struct, frozen=True):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]


class _Batch(_BatchFields, frozen=True):
    pass


class _BatchArray(_BatchFields, frozen=True, array_like=True):
    pass


StoredEvent: TypeAlias = Stored | _StoredArray
RemovedEvent: TypeAlias = Removed | _RemovedArray
ClearedEvent: TypeAlias = Cleared | _ClearedArray
KvEvent: TypeAlias = StoredEvent | RemovedEvent | ClearedEvent

_batch: Final = msgspec.msgpack.Decoder(_Batch).decode
_batch_array: Final = msgspec.msgpack.Decoder(_BatchArray).decode
_event: Final = msgspec.msgpack.Decoder(Stored | Removed | Cleared).decode
_event_array: Final = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode


def read_batch(payload: bytes) -> list[KvEvent | None]:
    """None = an event of a kind that is not known, or that makes no sense. Raises Unreadable."""
    if len(payload) > MAX_BATCH_BYTES:
        raise Unreadable(f"a batch of {len(payload)} bytes, {MAX_BATCH_BYTES} is the limit")
    batch: _BatchFields
    try:
        batch = _batch_array(payload) if _is_array(payload) else _batch(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from None
    return [_read(bytes(raw)) for raw in batch.events]


def _read(raw: bytes) -> KvEvent | None:
    event: KvEvent
    try:
        event = _event_array(raw) if _is_array(raw) else _event(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(event, StoredEvent) and event.medium in ON_DEVICE:
        size = event.block_size
        if size < 1 or len(event.token_ids) != size * len(event.block_hashes):
            return None
    return event


def _is_array(data: bytes) -> bool:
    """By msgpack's first byte: fixarray, array 16 or array 32."""
    return bool(data) and (data[0] >> 4 == 0x9 or data[0] in (0xDC, 0xDD))
