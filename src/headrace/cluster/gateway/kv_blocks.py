"""Which blocks one engine has cached, under the names that the router knows.

An engine's hashes are its own, and its blocks may be of any size. What they have in common with a
request are tokens: each event brings those of its blocks, so that names can be made of them, for
each NAME_TOKENS tokens one, as headrace names blocks of its own (`core/kv/names.py`).

Decides what an event changes; refuses to know how it came.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from headrace.cluster.gateway.ask import TOKENS_PER_BLOCK
from headrace.cluster.gateway.kv_wire import (
    ON_DEVICE,
    ClearedEvent,
    Hash,
    KvEvent,
    RemovedEvent,
    StoredEvent,
)
from headrace.core.base.events import BlocksRemoved, BlocksStored, KvChange
from headrace.core.base.types import BlockId
from headrace.core.kv.names import child_name, root_name

NAME_TOKENS: Final = TOKENS_PER_BLOCK
MAX_BLOCKS: Final = 1 << 21  # of an engine; more than that is no cache, but a fault
MAX_TOKEN_ID: Final = (1 << 32) - 1

# Kinds of KV cache groups in which every block of a prefix must be there. Groups of other kinds
# (sliding windows, states) need less, so they say nothing more.
_WHOLE_PREFIX: Final = frozenset({None, "full_attention", "mla_attention"})
_NO_BLOCK: Final = BlockId(0)  # to a router, a block's place means nothing

Changes = list[KvChange]


def prompt_root(adapter: str = "", salt: str = "") -> bytes:
    """The parent of a prompt's first block. A model is no part of it: the router asks only engines
    that serve the model.
    """
    return root_name("", "", NAME_TOKENS, adapter, salt)


def prompt_names(root: bytes, tokens: Sequence[int], max_names: int) -> tuple[bytes, ...]:
    """Of the full blocks of a prompt."""
    names: list[bytes] = []
    last = min(len(tokens), max_names * NAME_TOKENS) - NAME_TOKENS
    for start in range(0, last + 1, NAME_TOKENS):
        root = child_name(root, tokens[start : start + NAME_TOKENS])
        names.append(root)
    return tuple(names)


class _Block(NamedTuple):
    """What must be known of a block to name what comes after it."""

    parent: bytes  # name of the last whole piece, this block included
    tail: "array[int]"  # tokens behind it
    names: tuple[bytes, ...]  # of the pieces that this block completes
    num_stored: int  # an engine may hold equal blocks twice


class EngineBlocks:
    """Fed with events in order. Names go with the block that completed them."""

    def __init__(self) -> None:
        self.num_unknown = 0  # events that could not be made use of
        self._blocks: dict[Hash, _Block] = {}
        # Equal tokens may be stored under several hashes (salted otherwise, by another size).
        self._num_by_name: dict[bytes, int] = {}
        self._group: int | None = None  # the one that is listened to
        self._has_group = False

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def names(self) -> tuple[bytes, ...]:
        return tuple(self._num_by_name)

    def clear(self) -> None:
        self._blocks.clear()
        self._num_by_name.clear()
        self._has_group = False

    def apply(self, events: Iterable[KvEvent | None]) -> tuple[bool, Changes]:
        """Whether all that was known before is void, and what has changed since."""
        is_void, changes = False, Changes()
        for event in events:
            if isinstance(event, ClearedEvent):
                self.clear()
                is_void, changes = True, Changes()
            elif event is None:
                self.num_unknown += 1
            elif event.medium in ON_DEVICE and self._is_listened_to(event):
                if isinstance(event, StoredEvent):
                    self._store(event, changes)
                else:
                    self._remove(event, changes)
        return is_void, changes

    def _is_listened_to(self, event: StoredEvent | RemovedEvent) -> bool:
        """One group is as good as another where blocks are stored in all of them together."""
        if isinstance(event, RemovedEvent):
            return self._has_group and event.group_idx == self._group
        if event.kv_cache_spec_kind not in _WHOLE_PREFIX:
            return False
        if not self._has_group:
            self._group, self._has_group = event.group_idx, True
        return event.group_idx == self._group

    def _store(self, event: StoredEvent, changes: Changes) -> None:
        block = self._parent_of(event)
        if block is None or not _are_tokens(event.token_ids):
            self.num_unknown += 1
            return
        if len(self._blocks) + len(event.block_hashes) > MAX_BLOCKS:
            self.num_unknown += 1
            return
        size = event.block_size
        for index, block_hash in enumerate(event.block_hashes):
            if index and _other_keys(event, index):
                self.num_unknown += 1  # a picture begins here
                return
            tokens = event.token_ids[index * size : (index + 1) * size]
            block = self._extend(block, tokens, block_hash)
            if block.num_stored == 1:
                self._add(block.names, changes)

    def _parent_of(self, event: StoredEvent) -> _Block | None:
        """None = unknown, or what it holds is not made of tokens alone."""
        others = _other_keys(event, 0)
        if event.parent_block_hash is not None:
            return None if others else self._blocks.get(event.parent_block_hash)
        if len(others) > 1 or not all(isinstance(key, str) for key in others):
            return None
        salt = str(others[0]) if others else ""
        return _Block(prompt_root(event.lora_name or "", salt), array("I"), (), 0)

    def _extend(self, parent: _Block, tokens: Sequence[int], block_hash: Hash) -> _Block:
        """The block after `parent`, as it is known from now on."""
        known = self._blocks.get(block_hash)
        if known is None:
            line = parent.tail + array("I", tokens)
            name, names = parent.parent, []
            whole = len(line) - len(line) % NAME_TOKENS
            for start in range(0, whole, NAME_TOKENS):
                name = child_name(name, line[start : start + NAME_TOKENS])
                names.append(name)
            known = _Block(name, line[whole:], tuple(names), 0)
        known = known._replace(num_stored=known.num_stored + 1)
        self._blocks[block_hash] = known
        return known

    def _add(self, names: Iterable[bytes], changes: Changes) -> None:
        new: list[bytes] = []
        for name in names:
            count = self._num_by_name.get(name, 0)
            self._num_by_name[name] = count + 1
            if not count:
                new.append(name)
        if new:
            changes.append(BlocksStored(tuple(new), b"", (_NO_BLOCK,) * len(new)))

    def _remove(self, event: RemovedEvent, changes: Changes) -> None:
        gone: list[bytes] = []
        for block_hash in event.block_hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                continue  # stored before anybody listened
            if block.num_stored > 1:
                self._blocks[block_hash] = block._replace(num_stored=block.num_stored - 1)
                continue
            del self._blocks[block_hash]
            for name in block.names:
                self._num_by_name[name] -= 1
                if not self._num_by_name[name]:
                    del self._num_by_name[name]
                    gone.append(name)
        if gone:
            changes.append(BlocksRemoved(tuple(gone)))


def _other_keys(event: StoredEvent, index: int) -> list[object]:
    """What makes this block beside its tokens and its adapter."""
    keys = event.extra_keys
    of_block = keys[index] if keys is not None and index < len(keys) else None
    return [key for key in of_block or () if key != event.lora_name]


def _are_tokens(tokens: Sequence[int]) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID)
