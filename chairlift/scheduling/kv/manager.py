"""Block tables: where the keys and values of every sequence live.

Block ``i`` of a table holds positions ``i × block_size`` up to ``(i + 1) × block_size − 1`` of its sequence. Blocks
need not be neighbours in memory, so any free block serves any sequence and nothing fragments::

    sequence  "r7":  positions   0…15   16…31   32…39
              table             [  4 ,     9 ,     2  ]
"""

from __future__ import annotations

from collections import Counter

from chairlift.scheduling.kv.block_pool import BlockPool


class KVManager:
    """Gives blocks to sequences, all that are asked for or none."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._tables: dict[str, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""
        return self.pool.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.pool.num_blocks - self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens fills."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> list[int]:
        """The sequence's own block table, which later calls of :meth:`allocate` extend in place."""
        return self._tables[request_id]

    def has_table(self, request_id: str) -> bool:
        """Whether the sequence holds any blocks."""
        return request_id in self._tables

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Makes room for the sequence's first ``num_tokens`` tokens.

        Atomic: either the table is long enough afterwards, or ``False`` is returned and nothing has changed.
        """
        table = self._tables.get(request_id)
        missing = self.blocks_for(num_tokens) - (len(table) if table is not None else 0)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return False
            if table is None:
                self._tables[request_id] = blocks
            else:
                table.extend(blocks)
        return True

    def free(self, request_id: str) -> None:
        """Takes all the sequence's blocks; does nothing if it has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.release(reversed(table))

    def check_integrity(self) -> None:
        """Proves that every block is owned exactly as often as its count says, and is free exactly when that is 0.

        Raises:
            AssertionError: the accounts do not add up.
        """
        free = self.pool.free_blocks()
        if len(free) != self.pool.num_free or len(set(free)) != len(free):
            raise AssertionError(
                f"free list holds {len(free)} blocks, {len(set(free))} different; counted {self.pool.num_free}"
            )
        owned = Counter(block for table in self._tables.values() for block in table)
        for request_id, table in self._tables.items():
            if len(set(table)) != len(table):
                raise AssertionError(f"table of {request_id} names a block twice: {table}")
        in_free = set(free)
        for block, count in enumerate(self.pool.ref_counts):
            if owned[block] != count:
                raise AssertionError(f"block {block} is in {owned[block]} tables but counted {count} times")
            if (count == 0) != (block in in_free):
                raise AssertionError(
                    f"block {block} is held {count} times and {'is' if block in in_free else 'is not'} free"
                )
