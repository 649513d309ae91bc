"""The KV blocks of one device: which are free, and how many sequences hold each of the others.

The free list is a ring of block ids threaded through two arrays, so that any block can be taken out of its middle in
constant time. Entry ``num_blocks`` is the ring's fixed point and no block at all::

      head ─▶ 7 ◀─▶ 2 ◀─▶ 5 ◀─▶ … ◀─▶ 0 ◀─ tail
              taken first                taken last
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Fixed-size blocks with reference counts.

    A block is in the free list exactly when its count is 0. Blocks are handed out from the head of the list; freed ones
    come back to the head, so that memory already touched is used again before fresh memory is.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._num_free = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._num_free

    def allocate(self, count: int) -> list[int] | None:
        """Returns ``count`` blocks, each held once, or ``None`` and nothing has changed."""
        if count > self._num_free:
            return None
        blocks = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Gives up one hold on each block; those nobody holds any more are free again.

        The first block of a sequence is the likeliest to be wanted again, so a sequence is released from its tail.
        """
        for block in blocks:
            count = self.ref_counts[block]
            if count < 1:
                raise AssertionError(f"block {block} is released but nobody holds it")
            self.ref_counts[block] = count - 1
            if count == 1:
                self._link_after(self.num_blocks, block)

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
