"""Names of blocks by the CPU's instructions for SHA-256 are those of hashlib's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.kv.names import hash_blocks
from headrace.ops.native import _native


@pytest.mark.skipif(
    not _native.can_name_blocks(), reason="this CPU has no instructions for SHA-256"
)
@given(
    parent=st.binary(min_size=16, max_size=16),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    first=st.integers(0, 210),
    block_size=st.integers(1, 70),
    as_tuple=st.booleans(),
)
def test_names_are_those_of_hashlib(
    parent: bytes, tokens: list[int], first: int, block_size: int, as_tuple: bool
) -> None:
    given_tokens = tuple(tokens) if as_tuple else tokens
    found = _native.block_names(parent, given_tokens, first, block_size)
    assert found == hash_blocks(parent, tokens, first, block_size)
