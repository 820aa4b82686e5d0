"""The name of a KV block: a versioned chained hash of everything that decides its content.

    root  = H("kvh1", model digest, KV dtype, block size, adapter, salt)
    child = H(parent name, token ids as little-endian u32)

H is SHA-256 cut to 16 bytes; each field of the root is length-prefixed. The same name is used by
the device index, lower tiers, the wire and the router, so it depends on no process, seed or
architecture; the vectors in tests/unit/core/kv/test_names.py hold it still.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Final

VERSION: Final = "kvh1"
NAME_BYTES: Final = 16
WORD_BYTES: Final = 4  # of a token id


@lru_cache(maxsize=64)
def root_name(model_digest: str, kv_dtype: str, block_size: int, adapter: str, salt: str) -> bytes:
    """The parent of a sequence's first block. Different roots never share a block."""
    digest = sha256()
    for field in (VERSION, model_digest, kv_dtype, str(block_size), adapter, salt):
        data = field.encode()
        digest.update(struct.pack("<I", len(data)) + data)
    return digest.digest()[:NAME_BYTES]


def child_name(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the full block that holds `tokens` after `parent`."""
    return sha256(parent + _words(tokens)).digest()[:NAME_BYTES]


def _words(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


class BlockChain:
    """The names of a growing token list's full blocks, each computed once."""

    __slots__ = ("block_size", "names", "root")

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self.names: list[bytes] = []
        self.block_size = block_size

    @classmethod
    def of(cls, root: bytes, block_size: int, prompt: tuple[int, ...]) -> "BlockChain":
        """With a prompt's names, which cost nothing where it was named a moment ago: by a front end
        in the same process, for instance.
        """
        chain = cls(root, block_size)
        chain.names += _prompt_names(root, block_size, prompt)
        return chain

    def extend(self, tokens: Sequence[int]) -> None:
        """Name every full block of `tokens`, of which earlier calls saw a prefix."""
        size, names = self.block_size, self.names
        first = len(names) * size
        num_bytes = (len(tokens) - first) // size * size * WORD_BYTES
        if not num_bytes:
            return
        words = _words(tokens[first : first + num_bytes // WORD_BYTES])
        parent = names[-1] if names else self.root
        for start in range(0, num_bytes, size * WORD_BYTES):
            parent = sha256(parent + words[start : start + size * WORD_BYTES]).digest()[:NAME_BYTES]
            names.append(parent)


@lru_cache(maxsize=16)
def _prompt_names(root: bytes, block_size: int, prompt: tuple[int, ...]) -> list[bytes]:
    chain = BlockChain(root, block_size)
    chain.extend(prompt)
    return chain.names
