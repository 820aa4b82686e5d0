"""What replicas in C++ do with what nobody should give them."""

import pytest

from headrace.core.router.replicas import NUM_PARTS
from headrace.ops.native._native import Replicas


def test_names_count_by_their_first_sixteen_bytes() -> None:
    replicas = Replicas()
    assert replicas.add(1, [b"ab", b"ab" + bytes(14), bytes(16), b""]) == 2
    assert replicas.get(b"ab") == replicas.get(b"") == 1
    assert replicas.get(bytes(20)) == 1


def test_what_is_no_name_and_no_part_is_refused() -> None:
    replicas = Replicas()
    with pytest.raises(TypeError):
        replicas.add(1, ["ab"])  # type: ignore[list-item]
    with pytest.raises(IndexError):
        replicas.discard(NUM_PARTS, 1)
    assert replicas.items() == []
