"""Which block holds the keys and values of which tokens, so that equal beginnings are computed once.

The keys and values of a block depend on its own tokens and on all before them. A full block is therefore known by a
chain of hashes::

    root     = SHA-256(salt of this process, salt of the request)
    hash[i]  = SHA-256(hash[i − 1], token ids of block i)

The process's salt is random: nobody can work out a hash, or find out by timing a guess made elsewhere, what others have
asked. A request's own salt keeps its blocks to those who know it.

Nothing is removed while memory lasts: a block that no sequence holds stays known until the pool hands it out again.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import sha256

SALT_BYTES = 16


class PrefixCache:
    """A two-way map between full, computed blocks and their hashes."""

    def __init__(self, num_blocks: int, block_size: int, salt: bytes | None = None) -> None:
        self._block_size = block_size
        self._salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks

    def extend_hashes(self, hashes: list[bytes], token_ids: Sequence[int], request_salt: str | None) -> None:
        """Appends to ``hashes`` those of the full blocks of ``token_ids`` that it does not have yet."""
        size = self._block_size
        for end in range((len(hashes) + 1) * size, len(token_ids) + 1, size):
            parent = hashes[-1] if hashes else self._root(request_salt)
            hashes.append(sha256(parent + array("q", token_ids[end - size : end]).tobytes()).digest())

    def _root(self, request_salt: str | None) -> bytes:
        # Length first: no pair of salts may spell another pair's bytes.
        own = b"" if request_salt is None else b"+" + request_salt.encode("utf-8", "surrogatepass")
        return sha256(len(self._salt).to_bytes(8, "little") + self._salt + own).digest()

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest run of ``hashes``, from the first, that is known."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, block: int, block_hash: bytes) -> None:
        """Makes a computed block known. If another block is known by this hash already, it stays the one."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def knows(self, block: int) -> bool:
        """Whether the block can be found by its hash."""
        return self._hash_of[block] is not None

    def forget_hashes(self, hashes: Sequence[bytes]) -> None:
        """What is known by these may be wrong. Not only up to the first gap: somebody could fill that later."""
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is not None:
                self.forget(block)

    def forget(self, block: int) -> None:
        """Its content is about to be overwritten."""
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._block_of[block_hash]

    def check_integrity(self) -> None:
        """Raises AssertionError unless the two maps are each other's inverse."""
        known = {block_hash: block for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        if known != self._block_of:
            raise AssertionError("blocks and hashes of the prefix cache do not match")
