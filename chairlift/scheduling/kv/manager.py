"""Block tables: where the keys and values of every sequence live.

Block ``i`` of a table holds positions ``i × block_size`` up to ``(i + 1) × block_size − 1`` of its sequence. Blocks
need not be neighbours in memory, so any free block serves any sequence and nothing fragments. Sequences that begin
alike share the full blocks of their beginning, and write to none of them::

    sequence  "r7":  positions   0…15   16…31   32…39
              table             [  4 ,     9 ,     2  ]
    sequence  "r8":  table      [  4 ,     9 ,     7  ]      blocks 4 and 9 are held twice
"""

from __future__ import annotations

from collections import Counter

from chairlift.scheduling.kv.block_pool import BlockPool
from chairlift.scheduling.kv.prefix_cache import PrefixCache
from chairlift.scheduling.request import Request

CopyPairs = list[tuple[int, int]]


class KVManager:
    """Gives blocks to sequences, all that are asked for or none."""

    def __init__(
        self, num_blocks: int, block_size: int, *, num_host_blocks: int = 0, prefix_cache: PrefixCache | None = None
    ) -> None:
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(num_blocks, prefix_cache)
        self._host = BlockPool(num_host_blocks) if num_host_blocks else None
        self._tables: dict[str, list[int]] = {}
        self._host_tables: dict[str, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks on the device."""
        return self.pool.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks on the device that sequences hold."""
        return self.pool.num_blocks - self.pool.num_free

    @property
    def num_used_host_blocks(self) -> int:
        """Blocks on the host that sequences hold."""
        return self._host.num_blocks - self._host.num_free if self._host is not None else 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens fills."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> list[int]:
        """The sequence's own block table, which later calls of :meth:`allocate` extend in place."""
        return self._tables[request_id]

    def has_table(self, request_id: str) -> bool:
        """Whether the sequence holds any blocks on the device."""
        return request_id in self._tables

    def admit(self, request: Request, spare: int = 0) -> int | None:
        """Gives a sequence that has no blocks room for all its tokens, sharing what is computed of its beginning.

        At least its last token is left to compute (see :attr:`Request.num_reusable_tokens`). Atomic.

        Args:
            request: the sequence.
            spare: blocks that must be left over, for others.

        Returns:
            How many of its tokens need not be computed, or ``None`` if there is no room, and nothing has changed.
        """
        found: list[int] = []
        if self.prefix_cache is not None:
            self.prefix_cache.extend_hashes(request.block_hashes, request.token_ids, request.cache_salt)
            found = self.prefix_cache.find(request.block_hashes[: request.num_reusable_tokens // self.block_size])
        missing = self.blocks_for(request.num_tokens) - len(found)
        blocks = self.pool.allocate(missing, found, spare)
        if blocks is None:
            return None
        self._tables[request.request_id] = blocks
        return len(found) * self.block_size

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        """Makes the sequence's table long enough for its first ``num_tokens`` tokens.

        Atomic: either it is afterwards, or ``False`` is returned and nothing has changed.
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

    def register(self, request: Request, num_before: int) -> None:
        """Lets others find the full blocks that were computed since ``num_before`` tokens were.

        Never earlier: a block that can be found before its content is there gives others nonsense.
        """
        first, end = num_before // self.block_size, request.num_computed_tokens // self.block_size
        if self.prefix_cache is None or first == end:
            return
        self.prefix_cache.extend_hashes(request.block_hashes, request.token_ids, request.cache_salt)
        table = self._tables[request.request_id]
        for index in range(first, end):
            self.prefix_cache.register(table[index], request.block_hashes[index])

    def forget_prefix(self, request: Request) -> None:
        """Lets nobody find a block by the beginning of this sequence any more, whoever computed it."""
        if self.prefix_cache is not None:
            self.prefix_cache.forget_hashes(request.block_hashes)

    def swap_out(self, request: Request) -> CopyPairs | None:
        """Moves the computed blocks of a sequence to the host and takes its device blocks.

        Returns:
            (device, host) pairs to copy before anything else of the step, or ``None`` if the host has no room, and
            nothing has changed.
        """
        count = self.blocks_for(request.num_computed_tokens)
        host_blocks = self._host.allocate(count) if self._host is not None and count else None
        if host_blocks is None:
            return None
        table = self._tables.pop(request.request_id)
        self._host_tables[request.request_id] = host_blocks
        self.pool.release(reversed(table))
        return list(zip(table, host_blocks, strict=False))

    def swap_in(self, request: Request, spare: int = 0) -> CopyPairs | None:
        """Moves a sequence back to the device, with room for all its tokens.

        Returns:
            (host, device) pairs to copy before the step's forward pass, or ``None`` if the device has no room (with
            ``spare`` blocks left over), and nothing has changed.
        """
        blocks = self.pool.allocate(self.blocks_for(request.num_tokens), spare=spare)
        if blocks is None or self._host is None:
            return None
        host_blocks = self._host_tables.pop(request.request_id)
        self._host.release(host_blocks)
        self._tables[request.request_id] = blocks
        return list(zip(host_blocks, blocks, strict=False))

    def free(self, request_id: str) -> None:
        """Takes all the sequence's blocks, wherever they are; does nothing if it has none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.pool.release(reversed(table))
        host_table = self._host_tables.pop(request_id, None)
        if host_table is not None and self._host is not None:
            self._host.release(host_table)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block, on either side, is owned exactly as its count says."""
        for request_id, table in (*self._tables.items(), *self._host_tables.items()):
            if len(set(table)) != len(table):
                raise AssertionError(f"table of {request_id} names a block twice: {table}")
        both = self._tables.keys() & self._host_tables.keys()
        if both:
            raise AssertionError(f"{both} hold blocks on the device and on the host")
        self.pool.check_integrity(Counter(block for table in self._tables.values() for block in table))
        if self._host is not None:
            self._host.check_integrity(Counter(block for table in self._host_tables.values() for block in table))
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
