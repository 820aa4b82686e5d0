"""The name of a KV block: a versioned chained hash of everything that decides its content.

    root  = H("kvh1", model digest, KV dtype, block size, adapter, salt)
    child = H(parent name, token ids as little-endian u32)

H is SHA-256 cut to 16 bytes; each field of the root is length-prefixed. The same name is used by
the device index, lower tiers, the wire and the router, so it depends on no process, seed or
architecture; the vectors in tests/unit/core/kv/test_names.py hold it still. Whoever has faster
means to compute the same names may lend them (`name_with`).
"""

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import count
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
    return sha256(parent + words_of(tokens)).digest()[:NAME_BYTES]


def words_of(tokens: Sequence[int]) -> bytes:
    """Token ids as they are hashed, WORD_BYTES each."""
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def hash_blocks(
    parent: bytes, tokens: Sequence[int], first: int, block_size: int
) -> tuple[list[bytes], bytes]:
    """The names of all full blocks of `tokens` from the given token on, behind `parent`, and the
    words of these blocks.
    """
    names: list[bytes] = []
    num_tokens = max(0, len(tokens) - first) // block_size * block_size
    size, words = block_size * WORD_BYTES, words_of(tokens[first : first + num_tokens])
    for start in range(0, len(words), size):
        parent = sha256(parent + words[start : start + size]).digest()[:NAME_BYTES]
        names.append(parent)
    return names, words


NamesFrom = Callable[[bytes, Sequence[int], int, int], tuple[list[bytes], bytes]]
_names_from: NamesFrom = hash_blocks


def name_with(names_from: NamesFrom) -> None:
    """From now on, this computes what `hash_blocks` would."""
    global _names_from
    _names_from = names_from


class BlockChain:
    """The names of a growing token list's full blocks, each computed once, and the words of these
    blocks.
    """

    __slots__ = ("block_size", "names", "root", "words")

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self.names: list[bytes] = []
        self.words = bytearray()
        self.block_size = block_size

    @classmethod
    def of(cls, root: bytes, block_size: int, prompt: tuple[int, ...]) -> "BlockChain":
        """With a prompt's names, which cost nothing where this very prompt was named a moment ago:
        by a front end in the same process, for instance.
        """
        chain = cls(root, block_size)
        for named in _recent:
            if named.prompt is prompt and named.root == root and named.block_size == block_size:
                chain.names += named.names
                chain.words += named.words
                return chain
        chain.extend(prompt)
        _remember(_Named(prompt, root, block_size, chain.names.copy(), bytes(chain.words)))
        return chain

    def extend(self, tokens: Sequence[int]) -> None:
        """Name every full block of `tokens`, of which earlier calls saw a prefix."""
        parent = self.names[-1] if self.names else self.root
        first = len(self.names) * self.block_size
        if len(tokens) - first >= self.block_size:
            names, words = _names_from(parent, tokens, first, self.block_size)
            self.names += names
            self.words += words


class _Named:
    __slots__ = ("block_size", "names", "prompt", "root", "words")

    def __init__(
        self,
        prompt: tuple[int, ...],
        root: bytes,
        block_size: int,
        names: list[bytes],
        words: bytes,
    ) -> None:
        self.prompt = prompt
        self.root = root
        self.block_size = block_size
        self.names = names
        self.words = words


MAX_RECENT: Final = 16
# In the order of their coming, round and round. Threads may share it: nothing is ever taken out.
_recent: Final[list[_Named]] = []
_turns: Final = count()


def _remember(named: _Named) -> None:
    turn = next(_turns)
    if turn < MAX_RECENT:
        _recent.append(named)
    else:
        _recent[turn % MAX_RECENT] = named
