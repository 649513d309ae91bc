"""The KV blocks of one device: which are free, and how many sequences hold each of the others.

The free list is a ring of block ids threaded through two arrays, so that any block can be taken out of its middle in
constant time. Entry ``num_blocks`` is the ring's fixed point and no block at all::

      head ─▶ 7 ◀─▶ 2 ◀─▶ 5 ◀─▶ … ◀─▶ 0 ◀─ tail
              taken first                taken last
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chairlift.scheduling.kv.prefix_cache import PrefixCache


class BlockPool:
    """Fixed-size blocks with reference counts.

    A block is in the free list exactly when its count is 0. Blocks are handed out from the head of the list. Freed ones
    whose content nobody can find come back to the head, so that memory already touched is used before fresh memory is;
    those that the prefix cache knows go to the tail, and so are forgotten least recently used first.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._cache = cache
        self._num_free = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    def allocate(self, count: int, shared: Sequence[int] = (), spare: int = 0) -> list[int] | None:
        """Takes a hold on the ``shared`` blocks, and ``count`` others besides. Atomic.

        Args:
            count: how many blocks nobody holds to take.
            shared: blocks to hold as well. Those in the free list are not free for others, then.
            spare: how many must be left free.

        Returns:
            Shared and new ones in this order, or ``None`` and nothing has changed.
        """
        revived = sum(not self.ref_counts[block] for block in shared)
        if count + spare > self._num_free - revived:
            return None
        for block in shared:
            if not self.ref_counts[block]:
                self._unlink(block)
            self.ref_counts[block] += 1
        blocks = list(shared)
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            if self._cache is not None:
                self._cache.forget(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Gives up one hold on each block; those nobody holds any more are free again.

        Whoever releases a sequence begins with its tail: the blocks of its beginning are the likeliest to be found
        again, and so should be forgotten last.
        """
        for block in blocks:
            count = self.ref_counts[block]
            if count < 1:
                raise AssertionError(f"block {block} is released but nobody holds it")
            self.ref_counts[block] = count - 1
            if count == 1:
                known = self._cache is not None and self._cache.knows(block)
                self._link_after(self._prev[self.num_blocks] if known else self.num_blocks, block)

    def free_blocks(self) -> list[int]:
        """The free list, head first."""
        blocks = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._num_free -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self._num_free += 1

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Proves that every block is owned as often as its count says, and is free exactly when that is 0.

        Args:
            owners: how many tables name each block.

        Raises:
            AssertionError: the accounts do not add up.
        """
        free = self.free_blocks()
        if len(free) != self._num_free or len(set(free)) != len(free):
            raise AssertionError(
                f"free list has {len(free)} blocks, {len(set(free))} different; counted {self._num_free}"
            )
        in_free = set(free)
        for block, count in enumerate(self.ref_counts):
            if owners.get(block, 0) != count:
                raise AssertionError(f"block {block} is in {owners.get(block, 0)} tables but counted {count} times")
            if (count == 0) != (block in in_free):
                raise AssertionError(f"block {block} is held {count} times, in the free list: {block in in_free}")
