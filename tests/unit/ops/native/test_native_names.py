"""Names of blocks by the CPU's instructions for SHA-256 are those of core/kv/names.py."""

import pytest

from headrace.core.kv.names import child_name, words_of
from headrace.ops.native import _native

pytestmark = pytest.mark.skipif(
    not _native.can_name_blocks(), reason="this CPU has no instructions for SHA-256"
)


@pytest.mark.parametrize("block_size", [1, 8, 9, 10, 11, 16, 24, 25, 26, 32, 64, 128, 256])
def test_messages_of_every_padding(block_size: int) -> None:
    tokens = [7 * index % 49152 for index in range(3 * block_size)]
    names, words = _native.block_names(bytes(range(16)), tokens, 0, block_size)
    assert len(names) == 3
    assert words == words_of(tokens)
    assert names[2] == child_name(names[1], tokens[2 * block_size :])


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
def test_what_is_no_token_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        _native.block_names(bytes(16), [1, token], 0, 1)


def test_what_cannot_be_a_block_is_refused() -> None:
    with pytest.raises(_native.Fault, match="at least one token"):
        _native.block_names(bytes(16), [1], 0, 0)
    with pytest.raises(_native.Fault, match="16 bytes, got 3"):
        _native.block_names(b"abc", [1], 0, 1)
    with pytest.raises(TypeError):
        _native.block_names(bytes(16), ["one"], 0, 1)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _native.block_names(bytes(16), 5, 0, 1)  # type: ignore[arg-type]
