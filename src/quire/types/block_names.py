"""The names of KV blocks: keyed hashes of all tokens up to the end of a block.

The name of a block is blake2b(name of the block before it, its token ids), keyed with a secret. Neither a collision nor
a crafted prompt can make one request read the blocks of another. Processes that share the secret give equal names to
equal blocks, so the blocks of one can be found by another.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from hashlib import blake2b

SHORT_BYTES = 8  # of a name in the messages about cached blocks, where a collision only costs a detour
SECRET_BYTES = 32


def new_secret() -> bytes:
    """Return a secret that no other deployment has."""
    return os.urandom(SECRET_BYTES)


class BlockNames:
    """The function from tokens to names, for blocks of `block_size` tokens under one secret."""

    def __init__(self, block_size: int, secret: bytes) -> None:
        self.block_size = block_size
        self._keyed = blake2b(
            digest_size=16, key=secret
        )  # copied for each name, which is quicker than a new one

    def extend(self, names: list[bytes], salt: str, tokens: array[int], count: int) -> None:
        """Append names to `names` until it has `count`.

        Args:
            names: the names of the first blocks of the sequence; they are not computed again.
            salt: sequences with different salts share no names.
            tokens: int32 token ids of the sequence, at least `count` blocks.
            count: number of names wanted.
        """
        size, keyed = self.block_size, self._keyed
        name = names[-1] if names else salt.encode()
        for start in range(len(names) * size, count * size, size):
            digest = keyed.copy()
            digest.update(name + b"|" + tokens[start : start + size].tobytes())
            names.append(name := digest.digest())

    def short_names(self, salt: str, prompt: list[int]) -> list[bytes]:
        """Return the short names of the blocks that a prompt may find in a cache: all full ones before its last token."""
        names: list[bytes] = []
        self.extend(names, salt, array("i", prompt), (len(prompt) - 1) // self.block_size)
        return [name[:SHORT_BYTES] for name in names]


@dataclass(frozen=True, slots=True)
class NameChanges:
    """Changes of the set of blocks that a prefix cache can find: concatenated short names."""

    added: bytes = b""
    removed: bytes = b""


def split_names(joined: bytes) -> list[bytes]:
    """Return the short names of one field of `NameChanges`."""
    return [joined[at : at + SHORT_BYTES] for at in range(0, len(joined), SHORT_BYTES)]
