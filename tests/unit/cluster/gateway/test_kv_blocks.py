"""What an engine has cached, by the names that prompts have."""

import random
from typing import Any

import pytest

from headrace.cluster.gateway import kv_blocks
from headrace.cluster.gateway.kv_blocks import (
    NAME_TOKENS,
    Changes,
    EngineBlocks,
    prompt_names,
    prompt_root,
)
from headrace.cluster.gateway.kv_wire import read_batch
from headrace.core.base.events import BlocksStored
from support.kv_publisher import CLEARED, batch, removed, stored

PROMPT = [(7 * i) % 1000 for i in range(4 * NAME_TOKENS)]
NAMES = prompt_names(prompt_root(), PROMPT, 100)


def feed(blocks: EngineBlocks, *events: Any) -> tuple[bool, list[tuple[str, bytes]]]:
    is_void, changes = blocks.apply(read_batch(batch(*events)))
    return is_void, told(changes)


def told(changes: Changes) -> list[tuple[str, bytes]]:
    return [
        ("+" if isinstance(one, BlocksStored) else "-", name)
        for one in changes
        for name in one.names
    ]


def plus(*names: bytes) -> list[tuple[str, bytes]]:
    return [("+", name) for name in names]


def minus(*names: bytes) -> list[tuple[str, bytes]]:
    return [("-", name) for name in names]


@pytest.mark.parametrize("size", [1, 16, 24, NAME_TOKENS, 2 * NAME_TOKENS])
def test_blocks_of_any_size_have_the_names_of_the_prompt(size: int) -> None:
    blocks, num = EngineBlocks(), len(PROMPT) // size
    tokens = PROMPT[: num * size]
    hashes: list[int | bytes] = list(range(100, 100 + num))
    # In two events, the second going on where the first has ended.
    half = num // 2
    feed(blocks, stored(hashes[:half], tokens[: half * size]))
    feed(blocks, stored(hashes[half:], tokens[half * size :], parent=hashes[half - 1]))
    assert blocks.names() == prompt_names(prompt_root(), tokens, 100)
    # Evicted from its end on, nothing is left.
    for block_hash in reversed(hashes):
        feed(blocks, removed(block_hash))
    assert blocks.names() == ()
    assert blocks.num_blocks == blocks.num_unknown == 0


def test_a_name_goes_with_the_block_that_completed_it() -> None:
    blocks = EngineBlocks()
    hashes: list[int | bytes] = [b"%d" % i for i in range(16)]
    assert feed(blocks, stored(hashes, PROMPT)) == (False, plus(*NAMES))
    assert feed(blocks, removed(hashes[15])) == (False, minus(NAMES[3]))
    assert feed(blocks, removed(hashes[14], hashes[13], hashes[12])) == (False, [])
    assert feed(blocks, stored(hashes[12:], PROMPT[192:], parent=hashes[11])) == (
        False,
        plus(NAMES[3]),
    )


def test_a_block_that_is_there_twice_must_go_twice() -> None:
    blocks = EngineBlocks()
    assert feed(blocks, stored([1], PROMPT[:64]), stored([1], PROMPT[:64])) == (
        False,
        plus(NAMES[0]),
    )
    assert feed(blocks, removed(1)) == (False, [])
    assert feed(blocks, removed(1)) == (False, minus(NAMES[0]))
    assert feed(blocks, removed(1)) == (False, [])


def test_clearing_makes_void_what_was_before_it() -> None:
    blocks = EngineBlocks()
    feed(blocks, stored([1], PROMPT[:64]))
    assert feed(blocks, removed(1), CLEARED, stored([2], PROMPT[:64])) == (True, plus(NAMES[0]))
    assert blocks.num_blocks == 1


def test_salts_and_adapters_have_names_of_their_own() -> None:
    blocks = EngineBlocks()
    feed(blocks, stored([1], PROMPT[:64], lora_name="poet", extra_keys=[["poet", "salt"]]))
    feed(blocks, stored([2], PROMPT[64:128], parent=1, lora_name="poet", extra_keys=[["poet"]]))
    assert blocks.names() == prompt_names(prompt_root("poet", "salt"), PROMPT[:128], 100)
    assert not set(blocks.names()) & set(NAMES)


@pytest.mark.parametrize(
    "event",
    [
        stored([1], PROMPT[:64], parent=99),  # stored before anybody listened
        stored([1], PROMPT[:64], extra_keys=[[["picture", 3]]]),
        stored([1], PROMPT[:64], extra_keys=[["salt", "more"]]),
        stored([1], [-1] * 64),
        stored([1], [1 << 32] * 64),
    ],
)
def test_what_cannot_be_named_is_counted(event: Any) -> None:
    blocks = EngineBlocks()
    assert feed(blocks, event) == (False, [])
    assert blocks.num_unknown == 1
    # Nor can what follows it.
    assert feed(blocks, stored([2], PROMPT[64:128], parent=1)) == (False, [])


def test_a_picture_ends_what_has_names() -> None:
    blocks = EngineBlocks()
    keys = [None, [["picture", 0]], None]
    feed(blocks, stored([1, 2, 3], PROMPT[:192], extra_keys=keys))
    assert blocks.names() == NAMES[:1]


def test_other_places_and_other_groups_do_not_count() -> None:
    blocks = EngineBlocks()
    window: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    whole: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    assert feed(
        blocks,
        stored([9], PROMPT[:64], medium="CPU"),
        stored([1], PROMPT[:64], **window),
        stored([1], PROMPT[:64], **whole),
    ) == (False, plus(NAMES[0]))
    assert feed(blocks, removed(1, group_idx=0), removed(1, medium="CPU")) == (False, [])
    assert feed(blocks, removed(1, group_idx=1)) == (False, minus(NAMES[0]))


def test_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_blocks, "MAX_BLOCKS", 2)
    blocks = EngineBlocks()
    feed(blocks, stored([1, 2], PROMPT[:128]), stored([3], PROMPT[128:192], parent=2))
    assert (blocks.num_blocks, blocks.num_unknown) == (2, 1)


def test_changes_add_up_to_what_is_there() -> None:
    """Random lives of several prompts with shared beginnings, in blocks of 16."""
    rng = random.Random(5)
    blocks = EngineBlocks()
    chains: dict[int, tuple[int | None, list[int]]] = {}  # by hash: parent, tokens from the start
    seen: set[bytes] = set()
    for _ in range(600):
        if chains and rng.random() < 0.4:
            used = {parent for parent, _ in chains.values()}
            victim = rng.choice([one for one in chains if one not in used])
            del chains[victim]
            event = removed(victim)
        else:
            parent = rng.choice([None, *chains])
            tokens = [rng.randrange(3)] * 16
            before = [] if parent is None else chains[parent][1]
            block_hash = hash((parent, *tokens))
            if block_hash in chains:
                continue
            chains[block_hash] = (parent, before + tokens)
            event = stored([block_hash], tokens, parent=parent)
        for sign, name in feed(blocks, event)[1]:
            assert (name in seen) == (sign == "-")
            (seen.add if sign == "+" else seen.remove)(name)
        there = {
            prompt_names(prompt_root(), tokens, 100)[-1]
            for _, tokens in chains.values()
            if len(tokens) % NAME_TOKENS == 0
        }
        assert seen == set(blocks.names()) == there
